// One notice over the page, the worst wins: what the server tells is wrong, loading, connection lost.
import { icon, seconds, setText } from './words.js';

// Numbers older than this are greyed.
const STALE_S = 5;

export class Banner {
  #model; #socket; #root = document.querySelector('#live-banner'); #live = document.querySelector('#live');
  #lastUpdateAt = null; #refused = 0; #paused = false; #image = '';

  constructor(model, socket) {
    this.#model = model;
    this.#socket = socket;
    this.#root.querySelector('button').addEventListener('click', () => socket.retryNow());
    socket.addEventListener('refused', (event) => { this.#refused = event.detail; this.update(); });
    setInterval(() => this.update(), 1000);
  }

  set paused(paused) { this.#paused = paused; this.update(); }

  heard() {
    this.#lastUpdateAt = performance.now();
    this.#refused = 0;
    this.update();
  }

  update() {
    const age = this.#lastUpdateAt === null ? null : (performance.now() - this.#lastUpdateAt) / 1000;
    const lost = age !== null && age > 2.5 && !this.#paused && !document.hidden;
    this.#live.classList.toggle('is-stale', age !== null && age > STALE_S && !this.#paused);
    const shown = this.#find(age, lost);
    this.#root.hidden = !shown;
    if (!shown) return;
    const { tone, image, what, why, progress = null, retry = false } = shown;
    this.#root.className = `notice banner live-banner ${tone}`;
    if (this.#image !== image) { this.#image = image; this.#root.querySelector('[data-icon]').replaceChildren(icon(image)); }
    setText(this.#root.querySelector('[data-what]'), what);
    setText(this.#root.querySelector('[data-why]'), why);
    const bar = this.#root.querySelector('progress');
    bar.hidden = progress === null;
    if (progress !== null) bar.value = progress;
    this.#root.querySelector('button').hidden = !retry;
  }

  #find(age, lost) {
    const { state } = this.#model;
    if (this.#refused === 4401) return { tone: 'danger', image: 'lock', what: 'You are signed out.', why: 'Sign in again to see the server.' };
    if (this.#refused) return { tone: 'danger', image: 'lock', what: 'You are no longer an admin.', why: 'Only admins see this page.' };
    // Worst first, each with what to do: appliance/console/trouble.py.
    const [key, tone, image, what, why] = state.trouble?.[0] ?? [];
    if (tone === 'danger' || key === 'draining') return { tone, image, what, why };
    if (lost || (age === null && this.#socket.tries > 1)) return this.#lost(age);
    const loading = { loading: 'The model is loading', rebuilding: 'The engine failed and is loaded again', swapping: 'The model is being changed' }[state.state];
    if (loading) {
      const [share, text] = state.progress ?? [0, ''];
      return { tone: state.state === 'rebuilding' ? 'warn' : 'info', image: 'clock', what: `${loading}: ${Math.round(share * 100)} %.`, why: text ? `${text}.` : '', progress: share };
    }
    return key ? { tone, image, what, why } : null;
  }

  #lost(age) {
    const wait = Math.max(0, Math.round((this.#socket.nextTryAt - Date.now()) / 1000));
    const trying = this.#socket.nextTryAt ? `Trying again in ${wait} s.` : 'Waiting for an answer.';
    return { tone: 'warn', image: 'plug', what: age === null ? 'No connection to the server.' : `Connection lost. These numbers are ${seconds(age)} old.`, why: trying, retry: true };
  }
}
