// The console's socket: connects, reconnects with back-off, acknowledges. Knows no page.
const FIRST_RETRY_MS = 500, LONGEST_RETRY_MS = 15000;
// Closed by the server because of who asks: trying again would not help.
const REFUSED = new Set([4401, 4403]);

export class ConsoleSocket extends EventTarget {
  #url; #socket = null; #retryMs = FIRST_RETRY_MS; #timer = 0; #paused = false; #opened = false;
  tries = 0;
  nextTryAt = 0;

  constructor(url) {
    super();
    this.#url = url;
  }

  connect() {
    clearTimeout(this.#timer);
    this.nextTryAt = 0;
    this.tries += 1;
    const socket = this.#socket = new WebSocket(this.#url);
    this.#opened = false;
    socket.addEventListener('open', () => {
      this.#opened = true;
      if (this.#paused) this.#send({ type: 'console.pause' });
      this.#tell('open');
    });
    socket.addEventListener('message', (event) => {
      const message = JSON.parse(event.data);
      if (message.type !== 'console.update') return;
      this.tries = 0;
      this.#retryMs = FIRST_RETRY_MS;
      this.#send({ type: 'console.ack', n: message.n });
      this.#tell('update', message);
    });
    socket.addEventListener('close', (event) => {
      if (socket !== this.#socket) return;
      this.#socket = null;
      if (REFUSED.has(event.code)) { this.#tell('refused', event.code); return; }
      const wait = this.#retryMs * (0.75 + Math.random() / 2);
      this.#retryMs = Math.min(LONGEST_RETRY_MS, this.#retryMs * 2);
      this.nextTryAt = Date.now() + wait;
      this.#timer = setTimeout(() => this.connect(), wait);
      this.#tell('lost', { everOpened: this.#opened });
    });
  }

  // Now, for a person who does not want to wait for the next try.
  retryNow() {
    if (!this.#socket) { this.#retryMs = FIRST_RETRY_MS; this.connect(); }
  }

  pause() { this.#paused = true; this.#send({ type: 'console.pause' }); }
  resume() { this.#paused = false; this.#send({ type: 'console.resume' }); }
  resync() { this.#send({ type: 'console.resync' }); }

  #send(message) {
    if (this.#socket?.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(message));
  }

  #tell(type, detail) { this.dispatchEvent(new CustomEvent(type, { detail })); }
}
