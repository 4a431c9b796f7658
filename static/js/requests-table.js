// The table of requests: stable rows, focus kept, ended rows stay a while, and Kill with a dialog.
import { requestMark } from './canvas.js';
import { waitWords } from './wait-words.js';
import { count, icon, make, mark, many, rate, seconds, setText, shortId } from './words.js';

// What a request from there is unless its row says otherwise.
const CLASS_OF = { chat: 'interactive' };
// An ended row is shown this long, and as long as it has the focus or the pointer.
const SHOW_ENDED_S = 6;
const ENDINGS = { stop: ['check', 'ended', ''], length: ['check', 'ended, full length', ''], abort: ['stop', 'stopped', ''], error: ['error', 'failed', 'danger'] };

export class RequestsTable {
  #model; #body; #rows = new Map(); #filter = ''; #only = null; #dialog; #killing = null; #kill; #byRequest = false;

  // `kill(row)` returns a promise that fails with words for people.
  constructor(model, { kill, onPick }) {
    this.#model = model;
    this.#kill = kill;
    this.#body = document.querySelector('#requests');
    this.#dialog = document.querySelector('#kill-dialog');
    const filter = document.querySelector('#request-filter');
    filter.addEventListener('input', () => { this.#filter = filter.value.trim().toLowerCase(); this.update(); });
    this.#body.addEventListener('click', (event) => {
      const button = event.target.closest('button'), handle = Number(event.target.closest('tr')?.dataset.handle);
      const row = model.rows.get(handle);
      if (!button || !row) return;
      if (button.dataset.do === 'kill') this.#ask(row);
      else onPick(row);
    });
    this.#dialog.querySelector('[data-kill]').addEventListener('click', () => this.#confirm());
  }

  // The map's colours stand beside the requests then, not beside the users.
  set byRequest(byRequest) {
    this.#byRequest = byRequest;
    for (const { cells, tr } of this.#rows.values()) { cells.user.dataset.name = ''; this.#markRequest(cells, Number(tr.dataset.handle)); }
    this.update();
  }

  set only(only) { this.#only = only; this.update(); }

  update() {
    const model = this.#model, shown = this.#shown();
    for (const [handle, entry] of this.#rows) {
      if (!shown.has(handle)) { entry.tr.remove(); this.#rows.delete(handle); }
    }
    let at = 0;
    for (const row of shown.values()) {
      const entry = this.#rows.get(row.handle) ?? this.#make(row);
      this.#fill(entry, row);
      const there = this.#body.children[at];
      // Moving a row would take the focus away from it: the others move around it.
      if (there !== entry.tr && !entry.tr.contains(document.activeElement)) this.#body.insertBefore(entry.tr, there ?? null);
      at += 1;
    }
    const { running = 0, waiting = 0, slots, kv, state } = model.state, listed = model.waiting().length;
    setText(document.querySelector('[data-requests-count]'), `${count(running)} running, ${count(waiting)} waiting${waiting > listed ? `, ${count(listed)} of them shown` : ''}`);
    this.#empty(shown.size === 0, { slots, kv, state });
    if (this.#killing && this.#dialog.open) this.#describe();
  }

  #shown() {
    const { now } = this.#model, rank = (row) => (row.state === 'waiting' || row.state === 'preempted' ? 1e6 + (row.position ?? 0) : row.slot ?? 5e5);
    const wanted = [...this.#model.rows.values()].filter((row) => {
      const kept = this.#rows.get(row.handle)?.tr;
      if (row.ended !== null && now - row.ended > SHOW_ENDED_S && !kept?.matches(':hover, :focus-within')) return false;
      const words = `${this.#model.user(row).name} ${row.from} ${row.id}`.toLowerCase();
      return words.includes(this.#filter);
    });
    // Ended rows keep the place they had, so that nothing jumps under the pointer.
    const place = (row) => (row.ended !== null ? this.#rows.get(row.handle)?.rank ?? rank(row) : rank(row));
    wanted.sort((a, b) => place(a) - place(b) || a.handle - b.handle);
    for (const row of wanted) { const entry = this.#rows.get(row.handle); if (entry && row.ended === null) entry.rank = rank(row); }
    return new Map(wanted.map((row) => [row.handle, row]));
  }

  #make(row) {
    const tr = make('tr', { 'data-handle': row.handle }), cells = {};
    for (const name of ['state', 'user', 'id', 'from', 'slot', 'prompt', 'cached', 'written', 'own', 'ttft', 'speed', 'age', 'action']) {
      cells[name] = make('td', ['slot', 'prompt', 'cached', 'written', 'own', 'ttft', 'speed', 'age', 'action'].includes(name) ? { class: 'r' } : {});
      tr.append(cells[name]);
    }
    cells.id.append(make('button', { type: 'button', class: 'row-link mono', title: row.id, 'aria-label': `Show the block table of ${shortId(row.id)}` }, shortId(row.id)));
    cells.action.append(make('button', { type: 'button', class: 'button small danger quiet', 'data-do': 'kill' }, 'Kill'));
    this.#markRequest(cells, row.handle);
    const entry = { tr, cells, badge: '', rank: undefined };
    this.#rows.set(row.handle, entry);
    return entry;
  }

  #markRequest(cells, handle) {
    cells.id.querySelector('.user-mark')?.remove();
    if (this.#byRequest) cells.id.prepend(mark(requestMark(handle)));
  }

  #fill(entry, row) {
    const { cells, tr } = entry, user = this.#model.user(row), ended = row.ended !== null;
    this.#badge(entry, row);
    if (cells.user.dataset.name !== user.name) {
      cells.user.dataset.name = user.name;
      cells.user.replaceChildren(make('span', { class: 'user' }, ...(this.#byRequest ? [] : [mark(user)]), user.name));
      cells.action.firstChild.setAttribute('aria-label', `Kill ${shortId(row.id)} of ${user.name}`);
    }
    const waits = row.state === 'waiting' || row.state === 'preempted', size = this.#model.state.kv?.block_size ?? 16;
    const text = {
      from: row.class && row.class !== CLASS_OF[row.from] ? `${row.from}, ${row.class}` : row.from, slot: row.slot === null || row.slot === undefined || waits ? '–' : String(row.slot + 1),
      prompt: count(row.prompt ?? 0), cached: waits && !row.cached ? '–' : count(row.cached ?? 0), written: row.written ? count(row.written) : '–',
      own: ended ? '–' : waits ? `needs ${count(row.wait?.[1] ?? Math.ceil(((row.prompt ?? 0) + (row.written ?? 0) + 1) / size))}` : count(row.own ?? 0),
      ttft: seconds(row.ttft), speed: row.speed === null ? '–' : rate(row.speed), age: seconds((row.ended ?? this.#model.now) - row.since),
    };
    for (const [name, value] of Object.entries(text)) setText(cells[name], value);
    tr.classList.toggle('is-ended', ended);
    tr.classList.toggle('is-selected', this.#only?.kind === 'request' && this.#only.key === row.handle);
    const kill = cells.action.firstChild;
    // A button with the focus stays where it is, and says that there is nothing left to kill.
    kill.setAttribute('aria-disabled', String(ended));
  }

  #badge(entry, row) {
    const [image, words, tone] = this.#stateWords(row), why = waitWords(row, this.#model.state), key = `${image} ${words} ${why}`;
    if (entry.badge === key) return;
    entry.badge = key;
    entry.cells.state.replaceChildren(make('span', { class: `badge ${tone}` }, icon(image), words), ...(why ? [make('span', { class: 'wait-why' }, why)] : []));
  }

  #stateWords(row) {
    if (row.ended !== null) return ENDINGS[row.reason] ?? ENDINGS.stop;
    if (row.state === 'prefill') return ['retry', `reads, ${Math.min(99, Math.floor((row.computed ?? 0) / Math.max(1, (row.prompt ?? 0) + (row.written ?? 0)) * 100))} %`, 'info'];
    if (row.state === 'decode') return ['play', 'writes', ''];
    const place = row.position === null ? '' : `, no. ${count(row.position + 1)}`;
    if (row.state === 'preempted') return ['undo', `preempted${place}`, 'warn'];
    return ['clock', `waits${place}`, 'warn'];
  }

  #empty(isEmpty, { slots, kv, state }) {
    const empty = document.querySelector('#requests-empty');
    empty.hidden = !isEmpty;
    if (!isEmpty) return;
    const filtered = this.#filter && this.#model.rows.size;
    setText(empty.querySelector('h3'), filtered ? `Nothing found for “${this.#filter}”` : 'No requests are running');
    const last = Math.max(...[...this.#model.rows.values()].map((row) => row.ended ?? 0), 0);
    const free = slots && kv && state === 'ready' ? `All ${many(slots.effective, 'slot')} are free, and no block is held.` : '';
    setText(empty.querySelector('p'), filtered ? 'User names, keys and request ids were searched.' : `${free}${last ? ` The last request ended ${seconds(this.#model.now - last)} ago.` : ''}`);
  }

  #ask(row) {
    if (row.ended !== null) return;
    this.#killing = row;
    setText(this.#dialog.querySelector('h2'), `Kill ${shortId(row.id)} of ${this.#model.user(row).name}?`);
    this.#error('');
    this.#describe();
    this.#dialog.showModal();
  }

  #describe() {
    const row = this.#killing, name = this.#model.user(row).name, waits = row.state === 'waiting';
    const button = this.#dialog.querySelector('[data-kill]');
    button.disabled = row.ended !== null;
    let text = `It ended by itself a moment ago.`;
    if (row.ended === null && waits) text = `It leaves the waiting line; nothing was written yet. ${name} sees: “An admin stopped this answer.”`;
    else if (row.ended === null) text = `${row.written ? `The answer stops after ${many(row.written, 'token')}; what is written stays.` : 'Nothing is written yet.'} ${many(row.own ?? 0, 'block')} ${row.own === 1 ? 'becomes' : 'become'} free. ${name} sees: “An admin stopped this answer.”`;
    setText(this.#dialog.querySelector('[data-what]'), text);
  }

  async #confirm() {
    const row = this.#killing;
    try {
      await this.#kill(row);
      this.#dialog.close();
      this.#killing = null;
    } catch (error) {
      this.#error(error.message);
    }
  }

  #error(text) {
    const place = this.#dialog.querySelector('.field-error');
    setText(place, text);
    place.hidden = !text;
  }
}
