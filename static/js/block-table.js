// The block table of one request: which of its tokens stand in which blocks, and who shares them.
import { count, make, many, mark, setText, shortId } from './words.js';

const MOST_ROWS = 200;

// Runs of neighbouring blocks: { from, to (tokens), block, number (of blocks), holders, filled }.
export function tableRuns(model, handle) {
  const { codes, positions, holders, partial } = model, size = model.state.kv?.block_size ?? 16;
  const mine = new Set([...holders].filter(([, handles]) => handles.includes(handle)).map(([code]) => code));
  const blocks = [];
  codes.forEach((code, block) => { if (mine.has(code)) blocks.push(block); });
  blocks.sort((a, b) => positions[a] - positions[b]);
  const runs = [];
  for (const block of blocks) {
    const last = runs.at(-1), filled = partial.get(block) ?? size, joins = last && last.code === codes[block] && last.block + last.number === block && last.to === positions[block] && last.isFull;
    if (joins) { last.number += 1; last.to += filled; last.isFull = filled === size; }
    else runs.push({ code: codes[block], block, number: 1, from: positions[block], to: positions[block] + filled, holders: holders.get(codes[block]).length, isFull: filled === size });
  }
  return runs;
}

export class BlockTable {
  #model; #root = document.querySelector('#block-table'); #body; #handle = null; #key = '';

  constructor(model, onClose) {
    this.#model = model;
    this.#body = this.#root.querySelector('tbody');
    this.#root.querySelector('button').addEventListener('click', onClose);
  }

  set only(only) {
    this.#handle = only?.kind === 'request' ? only.key : null;
    this.#key = '';
    this.update();
  }

  update() {
    const row = this.#handle === null ? null : this.#model.rows.get(this.#handle);
    this.#root.hidden = !row;
    if (!row) return;
    const runs = tableRuns(this.#model, this.#handle), user = this.#model.user(row), number = runs.reduce((sum, run) => sum + run.number, 0);
    const title = this.#root.querySelector('h3'), sum = runs.length ? `${many(number, 'block')} for ${many(runs.at(-1).to, 'token')}` : row.ended === null ? 'it waits and holds no block' : 'it has ended and given its blocks back';
    if (title.dataset.of !== row.id) { title.dataset.of = row.id; title.replaceChildren(mark(user), `Block table of ${shortId(row.id)}, ${user.name}`); }
    setText(this.#root.querySelector('[data-sum]'), sum);
    const key = JSON.stringify(runs);
    if (key === this.#key) return;
    this.#key = key;
    this.#body.replaceChildren(...runs.slice(0, MOST_ROWS).map((run) => this.#row(run)));
    setText(this.#root.querySelector('[data-more]'), runs.length > MOST_ROWS ? `and ${many(runs.length - MOST_ROWS, 'more row')}` : '');
    this.#root.querySelector('table').hidden = !runs.length;
  }

  #row({ from, to, block, number, holders, isFull }) {
    const blocks = number === 1 ? count(block) : `${count(block)}–${count(block + number - 1)}`;
    const held = holders > 1 ? `shared by ${count(holders)}` : isFull ? 'its own' : 'its own, being written';
    const tokens = to === from ? 'none yet' : `${count(from)}–${count(to - 1)}`;
    return make('tr', {}, make('td', { class: 'r' }, tokens), make('td', { class: 'r' }, blocks), make('td', { class: 'r' }, count(number)), make('td', {}, held));
  }
}
