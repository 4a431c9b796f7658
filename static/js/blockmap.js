// KV block map: one cell a block. Colour and shape say whose; pattern says in what state.
// Only the visible rows are drawn, as runs of equal cells filled with one pattern each.
import { CACHED, FREE, KEPT } from './console-model.js';
import { cellOrder } from './block-order.js';
import { hueToken, requestMark, shapeOver, token } from './canvas.js';
import { blockFacts } from './block-facts.js';
import { count, make, mark, setText } from './words.js';

const SIZES = [24, 20, 16, 14, 12, 10, 8, 7, 6, 5], TALLEST = 300, DIMMED = 0.14;
// A map larger than this is sorted by user at most once a second.
const LARGE = 20000;
// Width of the card that says what a cell is.
const CARD = 268;

export class BlockMap {
  #canvas; #scroll; #spacer; #card; #spoken; #model;
  #size = 8; #cols = 8; #ratio = 1; #tiles = new Map(); #styles = new Map(); #ink = {};
  #byUser = false; #byRequest = false; #order = null; #orderedAt = 0; #only = null; #cursor = -1; #ranked = []; #frame = 0;

  // `onPick(row)` is told which request a press on a held cell means, or null for another cell.
  constructor(model, onPick) {
    this.#model = model;
    this.#canvas = document.querySelector('#block-map');
    this.#scroll = document.querySelector('.map-scroll');
    this.#spacer = document.querySelector('.map-spacer');
    this.#card = document.querySelector('#block-card');
    this.#spoken = document.querySelector('#block-spoken');
    const canvas = this.#canvas;
    const pick = () => {
      const holders = this.#cursor < 0 ? [] : model.holdersOf(this.#blockAt(this.#cursor));
      onPick(holders.length === 1 ? holders[0] : null);
    };
    canvas.addEventListener('pointermove', (event) => this.#hover(event));
    canvas.addEventListener('pointerleave', () => this.#leave());
    canvas.addEventListener('blur', () => this.#leave());
    canvas.addEventListener('click', pick);
    canvas.addEventListener('keydown', (event) => this.#key(event, pick));
    // Several scroll events of one frame are painted once.
    this.#scroll.addEventListener('scroll', () => { this.#frame ||= requestAnimationFrame(() => { this.#frame = 0; this.#paint(); }); }, { passive: true });
    new ResizeObserver(() => this.draw()).observe(this.#scroll);
    addEventListener('themechange', () => { this.#tiles.clear(); this.draw(); });
  }

  set only(only) { this.#only = only; this.draw(); }
  set byUser(byUser) { this.#byUser = byUser; this.#orderedAt = 0; this.#leave(); this.draw(); }
  // Colour and shape say which request, not whose.
  set byRequest(byRequest) { this.#byRequest = byRequest; this.draw(); }
  // User keys in the order of the legend: "by user" sorts the cells in it.
  set ranked(keys) { this.#ranked = keys; }
  get cellSize() { return this.#size; }

  draw() {
    this.#layout();
    this.#reorder();
    this.#paint();
    if (this.#cursor >= 0) this.#fillCard();
  }

  #layout() {
    const total = this.#model.codes.length, width = this.#scroll.clientWidth;
    if (!width) return;
    const columns = (size) => Math.max(8, Math.floor(width / size / 8) * 8);
    const fits = SIZES.find((size) => Math.ceil(total / columns(size)) * size <= TALLEST);
    const size = fits ?? SIZES.at(-1), ratio = devicePixelRatio || 1;
    if (size !== this.#size || ratio !== this.#ratio) this.#tiles.clear();
    this.#size = size;
    this.#ratio = ratio;
    this.#cols = columns(size);
    const height = Math.max(size, Math.ceil(total / this.#cols) * size), seen = Math.min(height, TALLEST);
    this.#scroll.classList.toggle('is-long', height > TALLEST);
    this.#spacer.style.height = `${height}px`;
    const cell = this.#cell(), w = this.#cols * cell, h = Math.ceil(seen / size) * cell;
    if (this.#canvas.width !== w || this.#canvas.height !== h) {
      this.#canvas.width = w;
      this.#canvas.height = h;
      this.#canvas.style.width = `${w / ratio}px`;
      this.#canvas.style.height = `${h / ratio}px`;
    }
  }

  // A cell in the screen's pixels: whole, so that patterns repeat without a seam.
  #cell() { return Math.max(3, Math.round(this.#size * this.#ratio)); }

  #reorder() {
    if (!this.#byUser) { this.#order = null; return; }
    const now = performance.now(), total = this.#model.codes.length;
    if (this.#order?.length === total && total > LARGE && now - this.#orderedAt < 1000) return;
    this.#orderedAt = now;
    this.#order = cellOrder(this.#model, this.#ranked);
  }

  #paint() {
    const { codes, partial, state } = this.#model, canvas = this.#canvas, c = canvas.getContext('2d');
    const cell = this.#cell(), cols = this.#cols, total = codes.length, order = this.#order;
    const first = Math.floor(this.#scroll.scrollTop / this.#size);
    const last = Math.min(Math.ceil(total / cols), first + Math.ceil(canvas.height / cell) + 1);
    const offset = Math.round(this.#scroll.scrollTop / this.#size * cell);
    this.#readTokens();
    this.#styles.clear();
    c.setTransform(1, 0, 0, 1, 0, 0);
    c.clearRect(0, 0, canvas.width, canvas.height);
    c.translate(0, -offset);
    const halves = [];
    for (let row = first; row < last; row++) {
      const from = row * cols, to = Math.min(total, from + cols);
      let began = from, style = null;
      for (let i = from; i <= to; i++) {
        const block = i < to ? (order ? order[i] : i) : -1;
        const next = i < to ? this.#style(this.#model.codeAt(block)) : null;
        if (i < to && partial.has(block)) halves.push([i, block]);
        if (next === style) continue;
        if (style) {
          c.globalAlpha = style.dimmed ? DIMMED : 1;
          c.fillStyle = style.pattern;
          c.fillRect((began - from) * cell, row * cell, (i - began) * cell, cell);
        }
        began = i;
        style = next;
      }
    }
    for (const [i, block] of halves) this.#half(c, i, this.#style(codes[block]), partial.get(block) / (state.kv?.block_size ?? 16));
    c.globalAlpha = 1;
    if (this.#cursor >= 0) this.#ring(c);
  }

  // The block being written: filled from below as far as it holds tokens.
  #half(c, i, style, share) {
    if (!style.user) return;
    const cell = this.#cell(), gap = this.#gap(), inner = cell - gap;
    const x = (i % this.#cols) * cell, y = Math.floor(i / this.#cols) * cell, h = share ? Math.max(1, Math.round(inner * share)) : 0;
    c.globalAlpha = 1;
    c.clearRect(x, y, inner, inner);
    c.globalAlpha = style.dimmed ? DIMMED : 1;
    c.fillStyle = this.#ink.free;
    c.fillRect(x, y, inner, inner);
    c.fillStyle = this.#hue(style.user);
    c.fillRect(x, y + inner - h, inner, h);
  }

  #ring(c) {
    const cell = this.#cell(), r = this.#ratio, x = (this.#cursor % this.#cols) * cell, y = Math.floor(this.#cursor / this.#cols) * cell;
    c.lineWidth = 2 * r;
    c.strokeStyle = this.#ink.mark;
    c.strokeRect(x - 3 * r, y - 3 * r, cell + 5 * r, cell + 5 * r);
    c.strokeStyle = this.#ink.cursor;
    c.strokeRect(x - 1.5 * r, y - 1.5 * r, cell + 2 * r, cell + 2 * r);
  }

  #gap() { return Math.max(1, Math.round(this.#ratio)); }

  #readTokens() {
    if (this.#tiles.size) return;
    this.#ink = { shared: token('--block-shared'), cached: token('--block-cached'), free: token('--block-free'), mark: token('--block-mark'), cursor: token('--text'), hues: new Map() };
  }

  #hue(user) {
    if (!this.#ink.hues.has(user.hue)) this.#ink.hues.set(user.hue, hueToken(user));
    return this.#ink.hues.get(user.hue);
  }

  // How cells with one code look; the same object for all of them within one painting.
  #style(code) {
    let style = this.#styles.get(code);
    if (style) return style;
    const only = this.#only, handles = code < 0 ? [] : this.#model.holders.get(code) ?? [];
    let key = { [FREE]: 'free', [CACHED]: 'cached', [KEPT]: 'kept' }[code] ?? 'shared', user = null, mine = only?.kind === key;
    if (handles.length === 1) {
      const row = this.#model.rows.get(handles[0]);
      user = this.#byRequest ? requestMark(handles[0]) : this.#model.user(row);
      key = `user ${user.hue} ${user.shape}`;
      mine = only?.kind === 'user' && row?.owner === only.key;
    }
    if (only?.kind === 'request') mine = handles.includes(only.key);
    style = { user, dimmed: only !== null && !mine, pattern: this.#tile(key, user) };
    this.#styles.set(code, style);
    return style;
  }

  #tile(key, user) {
    if (this.#tiles.has(key)) return this.#tiles.get(key);
    const cell = this.#cell(), s = cell - this.#gap(), tile = document.createElement('canvas'), ink = this.#ink;
    tile.width = tile.height = cell;
    const c = tile.getContext('2d');
    c.fillStyle = user ? this.#hue(user) : key === 'shared' ? ink.shared : ink.free;
    c.fillRect(0, 0, s, s);
    if (user) shapeOver(c, user.shape, 0, 0, s, s, ink.mark, Math.max(1, Math.round(s / 4)));
    if (key === 'kept') {
      const q = Math.max(1, Math.round(s * 0.3)), at = Math.round((s - q) / 2);
      c.fillStyle = ink.cached;
      c.fillRect(at, at, q, q);
    }
    if (key === 'cached') {
      c.strokeStyle = ink.cached;
      c.lineWidth = Math.max(1, 1.5 * this.#ratio * Math.min(1, this.#size / 8));
      c.beginPath();
      c.moveTo(0.5, s - 0.5);
      c.lineTo(s - 0.5, 0.5);
      c.stroke();
    }
    if (key === 'shared') {
      const q = Math.max(1, Math.round(s * 0.32)), at = Math.round((s - q) / 2);
      c.fillStyle = ink.mark;
      c.fillRect(at, at, q, q);
    }
    const pattern = this.#canvas.getContext('2d').createPattern(tile, 'repeat');
    this.#tiles.set(key, pattern);
    return pattern;
  }

  #blockAt(i) { return this.#order ? this.#order[i] : i; }

  #hover(event) {
    const col = Math.floor(event.offsetX / this.#canvas.clientWidth * this.#cols);
    const i = Math.floor((event.offsetY + this.#scroll.scrollTop) / this.#size) * this.#cols + col;
    if (i < 0 || i >= this.#model.codes.length || col >= this.#cols) { this.#leave(); return; }
    if (i !== this.#cursor) this.#show(i);
  }

  #key(event, pick) {
    const total = this.#model.codes.length;
    if (event.key === 'Escape') this.#leave();
    if (event.key === 'Enter') pick();
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.#cols, ArrowUp: -this.#cols, Home: -total, End: total }[event.key];
    if (!step || !total) return;
    event.preventDefault();
    this.#show(this.#cursor < 0 && event.key !== 'End' ? 0 : Math.min(total - 1, Math.max(0, this.#cursor + step)));
    const y = Math.floor(this.#cursor / this.#cols) * this.#size;
    if (y < this.#scroll.scrollTop) this.#scroll.scrollTop = y;
    if (y + this.#size > this.#scroll.scrollTop + this.#scroll.clientHeight) this.#scroll.scrollTop = y + this.#size - this.#scroll.clientHeight;
    setText(this.#spoken, this.#sentence());
  }

  #show(i) {
    this.#cursor = i;
    this.#paint();
    this.#fillCard();
  }

  #leave() {
    if (this.#cursor < 0) return;
    this.#cursor = -1;
    this.#card.hidden = true;
    this.#paint();
  }

  #sentence() {
    const block = this.#blockAt(this.#cursor), { name, facts } = blockFacts(this.#model, block);
    return `Block ${block}, ${name}. ${facts.map((fact) => fact.join(': ')).join('. ')}`;
  }

  #fillCard() {
    if (this.#cursor >= this.#model.codes.length) { this.#leave(); return; }
    const block = this.#blockAt(this.#cursor), { name, user, facts } = blockFacts(this.#model, block);
    const list = make('dl', { class: 'facts' });
    for (const [term, value] of facts) list.append(make('dt', {}, term), make('dd', {}, value));
    const title = make('h3', {}, ...(user ? [mark(user)] : []), name, make('span', { class: 'caption' }, `block ${count(block)}`));
    this.#card.replaceChildren(title, list);
    this.#card.hidden = false;
    const x = (this.#cursor % this.#cols) * this.#size, y = Math.floor(this.#cursor / this.#cols) * this.#size - this.#scroll.scrollTop;
    const width = this.#cols * this.#size, right = x + this.#size + 8, left = x - 280;
    // Beside the cell, else below it: on a phone there is no room at its sides.
    const isBeside = right + CARD <= width || left >= 0;
    this.#card.style.left = `${isBeside ? (right + CARD <= width ? right : left) : Math.max(0, Math.min(x, width - CARD))}px`;
    this.#card.style.top = `${isBeside ? Math.max(0, y - 24) : y + this.#size + 8}px`;
  }
}
