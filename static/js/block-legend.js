// The table beside the map: blocks by user, with totals that add up, and the same as text.
import { CACHED, FREE } from './console-model.js';
import { bytes, count, make, mark, percent, setText } from './words.js';

// Rows change places at most this often, and never under the pointer or the focus.
const SORT_EVERY_MS = 5000;

export class BlockLegend {
  #model; #root; #users; #rows = new Map(); #order = []; #sortedAt = 0; #summary; #compare;

  constructor(model, onPress) {
    this.#model = model;
    this.#root = document.querySelector('#block-legend');
    this.#users = this.#root.querySelector('[data-users]');
    this.#summary = document.querySelector('#block-summary');
    this.#compare = document.querySelector('#map-compare');
    this.#root.addEventListener('click', (event) => {
      const row = event.target.closest('[data-key]');
      if (row) onPress(row.dataset.user === undefined ? { kind: row.dataset.key, key: row.dataset.key } : { kind: 'user', key: row.dataset.user });
    });
  }

  // User keys from top to bottom.
  get order() { return this.#order; }

  set only(only) {
    for (const button of this.#root.querySelectorAll('[data-key]')) {
      const mine = only && (button.dataset.user === undefined ? only.kind === button.dataset.key : only.kind === 'user' && only.key === button.dataset.user);
      button.setAttribute('aria-pressed', String(Boolean(mine)));
    }
  }

  update() {
    const counts = this.#count();
    this.#sort(counts.users);
    const total = this.#model.codes.length;
    for (const key of this.#order) {
      const { row, requests, blocks, share } = this.#rows.get(key), user = counts.users.get(key);
      row.hidden = !user;
      if (!user) { setText(blocks, '0'); continue; }
      setText(requests, [user.running ? count(user.running) : '', user.waiting ? `${count(user.waiting)} ${user.waiting === 1 ? 'waits' : 'wait'}` : ''].filter(Boolean).join(', ') || '0');
      setText(blocks, count(user.blocks));
      setText(share, percent(user.blocks, total));
    }
    const { kept } = this.#model, shown = { ...counts, kept, free: counts.free - kept };
    for (const kind of ['shared', 'cached', 'kept', 'free']) {
      const row = this.#root.querySelector(`[data-key="${kind}"]`);
      row.hidden = kind === 'kept' && !kept;
      setText(row.querySelector('[data-blocks]'), count(shown[kind]));
      setText(row.querySelector('[data-share]'), percent(shown[kind], total));
    }
    this.#summarise(counts, total);
  }

  #count() {
    const { holders, rows } = this.#model, byCode = this.#model.countByCode();
    const counts = { held: 0, shared: 0, cached: byCode.get(CACHED) ?? 0, free: byCode.get(FREE) ?? 0, users: new Map() };
    const user = (key) => {
      if (!counts.users.has(key)) counts.users.set(key, { blocks: 0, running: 0, waiting: 0 });
      return counts.users.get(key);
    };
    for (const row of this.#model.running()) user(row.owner).running += 1;
    for (const row of this.#model.waiting()) user(row.owner).waiting += 1;
    for (const [code, blocks] of byCode) {
      if (code < 0) continue;
      const handles = holders.get(code) ?? [];
      if (handles.length > 1) { counts.shared += blocks; continue; }
      counts.held += blocks;
      user(rows.get(handles[0])?.owner ?? 'someone').blocks += blocks;
    }
    return counts;
  }

  #sort(users) {
    const known = new Set(this.#order), fresh = [...users.keys()].filter((key) => !known.has(key));
    const gone = this.#order.filter((key) => !users.has(key));
    const now = performance.now(), busy = this.#users.matches(':hover, :focus-within');
    if (!fresh.length && (busy || now - this.#sortedAt < SORT_EVERY_MS)) return;
    if (!busy) {
      for (const key of gone) { this.#rows.get(key).row.remove(); this.#rows.delete(key); }
      this.#order = [...users.keys()].sort((a, b) => users.get(b).blocks - users.get(a).blocks || (a < b ? -1 : 1));
      this.#sortedAt = now;
    } else this.#order = [...this.#order, ...fresh];
    for (const [at, key] of this.#order.entries()) {
      const entry = this.#rows.get(key) ?? this.#make(key);
      if (this.#users.children[at] !== entry.row) this.#users.insertBefore(entry.row, this.#users.children[at] ?? null);
    }
  }

  #make(key) {
    const user = this.#model.users.get(key) ?? { name: 'someone', hue: 0, shape: 0 };
    const requests = make('span', { class: 'requests' }), blocks = make('span', { 'data-blocks': '' }), share = make('span', { 'data-share': '' });
    const row = make('button', { type: 'button', 'data-key': user.name, 'data-user': key, 'aria-pressed': 'false' }, mark(user), make('span', { class: 'name' }, user.name), requests, blocks, share);
    const entry = { row, requests, blocks, share };
    this.#rows.set(key, entry);
    return entry;
  }

  // The same facts as the canvas, for those who do not see it, and for tests.
  #summarise(counts, total) {
    const data = { total, held: counts.held, shared: counts.shared, cached: counts.cached, free: counts.free, kept: this.#model.kept, step: this.#model.step };
    for (const [name, value] of Object.entries(data)) this.#summary.dataset[name] = String(value);
    setText(this.#summary, `Of ${count(total)} blocks ${count(counts.held)} are held by one request each, ${count(counts.shared)} are shared, ${count(counts.cached)} are cached and ${count(counts.free)} are free.`);
    setText(this.#compare, total ? this.#comparison(counts) : 'The map appears as soon as a model serves.');
  }

  // Waste here, and what contiguous reservations of the same requests would take.
  #comparison(counts) {
    const { kv, model } = this.#model.state, used = counts.held + counts.shared;
    if (!kv || !used) return '';
    const size = kv.block_size, wasted = kv.slots_wasted ?? 0, filled = Math.round((1 - wasted / (used * size)) * 100);
    const running = this.#model.running(), context = model?.context_tokens;
    let text = `${filled} % of the used blocks' room holds tokens; ${count(wasted)} token places are empty.`;
    if (context && running.length) {
      const reserved = Math.ceil(context / size) * running.length, tokens = used * size - wasted;
      text += ` Whole reservations of ${count(context)} tokens for the same ${running.length === 1 ? 'request' : `${running.length} requests`} would take ${count(reserved)} blocks (${bytes(reserved * kv.bytes_per_block)}) instead of ${count(used)}, ${percent(tokens, reserved * size)} of them filled.`;
    }
    return text;
  }
}
