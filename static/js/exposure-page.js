// Shows how long a change is still on trial. The server owns the clock; when it is over, the page
// is asked for again and says what holds now.
const bar = document.querySelector('[data-countdown]');
const text = document.querySelector('[data-seconds]');
const ends = performance.now() + bar.value * 1000;

const timer = setInterval(() => {
  const left = Math.max(0, Math.ceil((ends - performance.now()) / 1000));
  bar.value = left;
  text.textContent = `${Math.floor(left / 60)}:${String(left % 60).padStart(2, '0')}`;
  if (left === 0) {
    clearInterval(timer);
    // A little later than the server's own end.
    setTimeout(() => location.assign(location.pathname), 1000);
  }
}, 250);
