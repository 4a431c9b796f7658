// The console's socket: connects, reconnects with back-off, acknowledges. Knows no page.
const FIRST_RETRY_MS = 500, LONGEST_RETRY_MS = 15000;
// An open socket that is silent this long, though it should tell, is given up.
const SILENCE_MS = 8000;
// Closed by the server because of who asks: trying again would not help.
const REFUSED = new Set([4401, 4403]);

export class ConsoleSocket extends EventTarget {
  #url; #socket = null; #retryMs = FIRST_RETRY_MS; #timer = 0; #silence = 0; #paused = false; #opened = false;
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
    this.#watch();
    socket.addEventListener('open', () => {
      this.#opened = true;
      if (this.#paused) this.#send({ type: 'console.pause' });
      this.#tell('open');
    });
    socket.addEventListener('message', (event) => {
      const message = JSON.parse(event.data);
      if (message.type !== 'console.update') return;
      if (socket !== this.#socket) return;
      this.tries = 0;
      this.#watch();
      this.#retryMs = FIRST_RETRY_MS;
      this.#send({ type: 'console.ack', n: message.n });
      this.#tell('update', message);
    });
    socket.addEventListener('close', (event) => {
      if (socket !== this.#socket) return;
      if (REFUSED.has(event.code)) { this.#socket = null; clearTimeout(this.#silence); this.#tell('refused', event.code); return; }
      this.#retryLater();
    });
  }

  #retryLater() {
    clearTimeout(this.#silence);
    this.#socket = null;
    const wait = this.#retryMs * (0.75 + Math.random() / 2);
    this.#retryMs = Math.min(LONGEST_RETRY_MS, this.#retryMs * 2);
    this.nextTryAt = Date.now() + wait;
    this.#timer = setTimeout(() => this.connect(), wait);
    this.#tell('lost', { everOpened: this.#opened });
  }

  #watch() {
    clearTimeout(this.#silence);
    if (this.#paused) return;
    this.#silence = setTimeout(() => {
      const silent = this.#socket;
      this.#retryLater();
      silent?.close();
    }, SILENCE_MS);
  }

  // Now, for a person who does not want to wait for the next try.
  retryNow() {
    const silent = this.#socket;
    this.#socket = null;
    silent?.close();
    this.#retryMs = FIRST_RETRY_MS;
    this.connect();
  }

  pause() {
    this.#paused = true;
    clearTimeout(this.#silence);
    this.#send({ type: 'console.pause' });
  }

  resume() {
    this.#paused = false;
    if (this.#socket) this.#watch();
    this.#send({ type: 'console.resume' });
  }

  resync() { this.#send({ type: 'console.resync' }); }

  #send(message) {
    if (this.#socket?.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(message));
  }

  #tell(type, detail) { this.dispatchEvent(new CustomEvent(type, { detail })); }
}
