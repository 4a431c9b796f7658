// The connection to /ws/chat/: connects, waits and tries again, notices a dead line. No DOM of the page.
//
// Events: "open", "message" (detail: the message), "down" (detail: {retryInMs, tries}), "refused"
// (the session ended or the server does not take this page: the page asks /chat/state/ why).
const FIRST_WAIT_MS = 400;
const LONGEST_WAIT_MS = 15000;
// A line that is silent for this long is asked; without an answer it counts as dead.
const SILENCE_MS = 25000;
const ANSWER_MS = 8000;
const SIGNED_OUT = 4401;

export class ChatSocket extends EventTarget {
  #url;
  #socket = null;
  #tries = 0;
  #retryTimer = 0;
  #silenceTimer = 0;
  #stopped = false;

  constructor(path) {
    super();
    const url = new URL(path, location.href);
    url.protocol = url.protocol === 'https:' ? 'wss:' : 'ws:';
    this.#url = url.href;
    addEventListener('online', () => this.retryNow());
    document.addEventListener('visibilitychange', () => { if (!document.hidden) this.#probe(); });
    // A page kept for the back button has lost its line.
    addEventListener('pageshow', (event) => { if (event.persisted) this.retryNow(); });
  }

  get isOpen() { return this.#socket?.readyState === WebSocket.OPEN; }

  connect() {
    this.#stopped = false;
    clearTimeout(this.#retryTimer);
    this.#retryTimer = 0;
    const socket = new WebSocket(this.#url);
    this.#socket = socket;
    let opened = false;
    socket.addEventListener('open', () => {
      opened = true;
      this.#tries = 0;
      this.#heard();
      this.dispatchEvent(new Event('open'));
    });
    socket.addEventListener('message', (event) => {
      if (socket !== this.#socket) return;
      this.#heard();
      const message = JSON.parse(event.data);
      if (message.type !== 'pong') this.dispatchEvent(new CustomEvent('message', { detail: message }));
    });
    socket.addEventListener('close', (event) => {
      if (socket !== this.#socket) return;
      this.#lost(event.code === SIGNED_OUT || !opened);
    });
  }

  // True when it went out. What did not is sent by the page after the next "open".
  send(message) {
    if (!this.isOpen) return false;
    this.#socket.send(JSON.stringify(message));
    return true;
  }

  retryNow() {
    if (this.#stopped) return;
    if (this.#retryTimer) this.connect();
    else this.#probe();
  }

  // No further tries, until connect().
  stop() {
    this.#stopped = true;
    clearTimeout(this.#retryTimer);
    clearTimeout(this.#silenceTimer);
    this.#retryTimer = 0;
    const socket = this.#socket;
    this.#socket = null;
    socket?.close();
  }

  #lost(refused) {
    clearTimeout(this.#silenceTimer);
    this.#socket = null;
    if (this.#stopped) return;
    this.#tries += 1;
    const longest = Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** (this.#tries - 1));
    const waitMs = longest * (0.6 + 0.4 * Math.random());
    this.#retryTimer = setTimeout(() => this.connect(), waitMs);
    this.dispatchEvent(new CustomEvent('down', { detail: { retryInMs: waitMs, tries: this.#tries } }));
    if (refused) this.dispatchEvent(new Event('refused'));
  }

  #heard() {
    clearTimeout(this.#silenceTimer);
    this.#silenceTimer = setTimeout(() => this.#probe(), SILENCE_MS);
  }

  #probe() {
    if (!this.send({ type: 'ping' })) return;
    const socket = this.#socket;
    clearTimeout(this.#silenceTimer);
    this.#silenceTimer = setTimeout(() => {
      if (socket !== this.#socket) return;
      this.#socket = null;
      socket.close();
      this.#lost(false);
    }, ANSWER_MS);
  }
}
