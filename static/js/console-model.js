// What the server told, put together from its deltas. Knows no page and no socket.
// KEPT is drawn only: free, and part of what the head-room setting keeps for growth.
export const FREE = -1, CACHED = -2, KEPT = -3;
export const QUEUED = 0, PREFILL = 1, DECODE = 2, PREEMPTED = 3;
// Ended requests are kept as long as the slots can still show them; samples as long as the plots.
const KEEP_ENDED_S = 150, KEEP_SAMPLES = 900, KEEP_EVENTS = 60;
const UNKNOWN = { name: 'someone', hue: 0, shape: 0 };

export class ConsoleModel {
  tick = -1;
  now = 0;
  epoch = 0;
  state = {};
  users = new Map();
  rows = new Map();
  events = [];
  columns = [];
  samples = [];
  step = -1;
  codes = new Int32Array(0);
  positions = new Int32Array(0);
  holders = new Map();
  partial = new Map();
  keptFrom = 0;
  kept = 0;
  #fields = [];

  // False when an update is missing before this one; then nothing was taken.
  apply(message) {
    if (message.base === -1) this.#clear();
    else if (message.base !== this.tick) return false;
    this.tick = message.tick;
    this.now = message.now;
    this.epoch = message.epoch;
    if (message.fields) this.#fields = message.fields;
    if (message.columns) this.columns = message.columns;
    Object.assign(this.state, message.state);
    for (const [key, [name, hue, shape]] of Object.entries(message.users ?? {})) this.users.set(key, { name, hue, shape });
    for (const flat of message.rows ?? []) this.#applyRow(flat);
    for (const [number, at, tone, icon, text] of message.events ?? []) this.events.unshift({ number, at, tone, icon, text });
    this.events.length = Math.min(this.events.length, KEEP_EVENTS);
    if (message.samples) this.samples = this.samples.concat(message.samples).slice(-KEEP_SAMPLES);
    this.#applyMap(message.map);
    this.#markKept();
    for (const [handle, row] of this.rows) if (row.ended !== null && row.ended < this.now - KEEP_ENDED_S) this.rows.delete(handle);
    return true;
  }

  user(row) { return (row && this.users.get(row.owner)) ?? UNKNOWN; }
  column(name) { return this.columns.indexOf(name); }
  last(name) { return this.samples.at(-1)?.[this.column(name)] ?? null; }

  codeAt(block) { return block >= this.keptFrom && this.codes[block] === FREE ? KEPT : this.codes[block]; }

  // Code -> how many cells have it. Runs of equal cells are counted at once: a pool can be large.
  countByCode() {
    const { codes } = this, found = new Map();
    for (let from = 0, to = 0; from < codes.length; from = to) {
      const code = codes[from];
      while (to < codes.length && codes[to] === code) to += 1;
      found.set(code, (found.get(code) ?? 0) + to - from);
    }
    return found;
  }

  // Requests that hold block `block`, if it is held.
  holdersOf(block) {
    const code = this.codes[block];
    return code < 0 ? [] : (this.holders.get(code) ?? []).map((handle) => this.rows.get(handle)).filter(Boolean);
  }

  running() { return [...this.rows.values()].filter((row) => row.ended === null && (row.state === 'decode' || row.state === 'prefill')); }
  waiting() {
    return [...this.rows.values()].filter((row) => row.ended === null && (row.state === 'waiting' || row.state === 'preempted'))
      .sort((a, b) => (a.position ?? 0) - (b.position ?? 0));
  }

  #clear() {
    this.state = {};
    this.users.clear();
    this.rows.clear();
    this.events = [];
    this.samples = [];
    this.step = -1;
  }

  #applyRow(flat) {
    const handle = flat[0];
    let row = this.rows.get(handle);
    if (!row) {
      row = { handle };
      for (const name of this.#fields) row[name] = null;
      this.rows.set(handle, row);
    }
    for (let at = 1; at < flat.length; at += 2) row[this.#fields[flat[at]]] = flat[at + 1];
  }

  #applyMap(map) {
    this.step = map.step;
    if (map.total !== undefined) {
      this.codes = new Int32Array(map.total).fill(FREE);
      this.positions = new Int32Array(map.total).fill(-1);
      this.holders.clear();
      this.partial.clear();
    }
    for (const [code, ...handles] of map.holders ?? []) this.holders.set(code, handles);
    const runs = map.runs ?? [], size = this.state.kv?.block_size ?? 16;
    for (let at = 0; at < runs.length; at += 5) {
      const [start, length, code, position, direction] = runs.slice(at, at + 5);
      this.codes.fill(code, start, start + length);
      for (let i = 0; i < length; i++) this.positions[start + i] = position + direction * i * size;
    }
    const partial = map.partial ?? [];
    for (let at = 0; at < partial.length; at += 2) {
      if (partial[at + 1] >= 0) this.partial.set(partial[at], partial[at + 1]);
      else this.partial.delete(partial[at]);
    }
    if (this.holders.size > 4000) this.#forgetHolders();
  }

  // Any free block serves as head-room: those at the end of the pool stand for as many as are kept.
  #markKept() {
    const { codes } = this, share = this.state.settings?.admission_headroom?.effective ?? 0, wanted = Math.floor(share * codes.length);
    this.kept = 0;
    this.keptFrom = codes.length;
    for (let block = codes.length - 1; block >= 0 && this.kept < wanted; block--) {
      if (codes[block] === FREE) { this.kept += 1; this.keptFrom = block; }
    }
  }

  // Codes that no cell uses are never sent again under the same number.
  #forgetHolders() {
    const used = new Set(this.codes);
    for (const code of this.holders.keys()) if (!used.has(code)) this.holders.delete(code);
  }
}
