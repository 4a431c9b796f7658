// Slots timeline: one row a slot, the last 120 s. Height and pattern say the phase; colour says whose.
import { PREEMPTED, PREFILL, QUEUED } from './console-model.js';
import { fit, hatch, hueToken, shapeOver, token } from './canvas.js';
import { actualBars, busyShare, median, staticReplay } from './static-replay.js';
import { seconds, setText } from './words.js';

// Slots past this many are drawn only while something was in them.
const LEAST_ROWS = 12;
const SPAN = 120, LANES = 3, LEFT = 58, TOP = 20;
const DIMMED = 0.16;

export class Timeline {
  #canvas = document.querySelector('#slot-timeline');
  #note = document.querySelector('#timeline-note');
  #sub = document.querySelector('#slots-title .sub');
  #model; #view = 'actual'; #only = null; #right = 60; #row = 20; #ink = null;

  constructor(model) {
    this.#model = model;
    for (const input of document.querySelectorAll('[name="timeline-view"]')) input.addEventListener('change', () => { this.view = input.value; });
    new ResizeObserver(() => this.draw()).observe(this.#canvas.parentElement);
    addEventListener('themechange', () => { this.#ink = null; this.draw(); });
  }

  set only(only) { this.#only = only; this.draw(); }
  set view(view) {
    this.#view = view;
    for (const part of this.#note.children) part.hidden = part.dataset.view !== view;
    this.draw();
  }

  draw() {
    const model = this.#model, actual = actualBars(model), now = model.now, isStatic = this.#view === 'static';
    const replay = staticReplay(actual, this.#effective, now), slots = this.#slots(isStatic ? replay.bars : actual, now - SPAN);
    const width = this.#canvas.parentElement.clientWidth;
    if (!width) return;
    this.#row = slots <= 14 ? 20 : slots <= 24 ? 17 : 14;
    const height = TOP + slots * this.#row + LANES * 20 + 10, c = fit(this.#canvas, width, height);
    this.#ink ??= { surface: token('--surface'), line: token('--line'), text: token('--text-2'), faint: token('--text-3'), danger: token('--danger'), idle: token('--block-cached'), row: token('--block-free'), font: token('--font'), hues: new Map() };
    c.font = `${this.#row < 16 ? 11 : 12}px ${this.#ink.font}`;
    c.textBaseline = 'middle';
    const running = this.#names(isStatic ? replay.bars.filter((bar) => bar.end >= now && bar.from < now) : actual.filter((bar) => bar.live), slots, width > 600 ? 20 : 12);
    this.#right = Math.min(150, Math.max(44, ...running.map((name) => c.measureText(name).width)) + 14);
    const X = (t) => LEFT + (t - now + SPAN) / SPAN * (width - LEFT - this.#right);
    this.#frame(c, X, width, height, slots, running, isStatic);
    c.save();
    c.beginPath();
    c.rect(LEFT, 0, width - LEFT - this.#right, height);
    c.clip();
    if (isStatic) for (const bar of replay.bars) this.#staticBar(c, bar, X);
    else this.#actualBars(c, actual, X);
    c.restore();
    c.globalAlpha = 1;
    const waiting = isStatic ? replay.waiting : actual.filter((bar) => bar.live && bar.segments.at(-1).phase === QUEUED).map(({ row, came }) => ({ row, came }));
    this.#lanes(c, waiting, X, TOP + slots * this.#row + 6, width);
    this.#say(actual, replay, Math.max(slots, this.#effective));
    setText(this.#sub, slots < this.#effective ? `last 2 minutes · nothing was in slots ${slots + 1} to ${this.#effective}` : 'last 2 minutes');
  }

  // Rows: those in use within the time that is drawn, also above the number of now, and some more.
  #slots(bars, from) {
    const spans = bars.flatMap((bar) => bar.segments ?? [{ slot: bar.slot, to: bar.idleUntil }]);
    const taken = spans.filter(({ to }) => to > from).map(({ slot }) => slot + 1);
    return Math.max(1, Math.min(this.#effective, LEAST_ROWS), ...taken);
  }

  get #effective() { return this.#model.state.slots?.effective ?? 1; }

  #names(bars, slots, most) {
    const names = Array(slots).fill('');
    for (const bar of bars) {
      const slot = bar.slot ?? bar.segments.at(-1).slot;
      if (slot >= 0 && slot < slots) names[slot] = this.#model.user(bar.row).name;
    }
    return names.map((name) => (name.length > most ? `${name.slice(0, most - 1)}…` : name));
  }

  #colour(row) {
    const user = this.#model.user(row), hues = this.#ink.hues;
    if (!hues.has(user.hue)) hues.set(user.hue, hueToken(user));
    return hues.get(user.hue);
  }

  #alpha(row) {
    const only = this.#only;
    if (only?.kind === 'user') return row.owner === only.key ? 1 : DIMMED;
    if (only?.kind === 'request') return row.handle === only.key ? 1 : DIMMED;
    return 1;
  }

  #frame(c, X, width, height, slots, running, isStatic) {
    const ink = this.#ink, now = this.#model.now;
    const apart = width < 480 ? 40 : 20;
    for (let back = SPAN; back >= 0; back -= apart) {
      const x = X(now - back);
      c.fillStyle = ink.line;
      c.fillRect(Math.round(x), TOP - 4, 1, height - TOP);
      c.fillStyle = ink.faint;
      c.textAlign = back === SPAN ? 'left' : 'center';
      c.fillText(back ? `−${back} s` : 'now', x, 8);
    }
    c.textAlign = 'left';
    for (let slot = 0; slot < slots; slot++) {
      const y = TOP + slot * this.#row, middle = y + this.#row / 2;
      c.fillStyle = ink.text;
      c.fillText(`Slot ${slot + 1}`, 0, middle);
      c.fillStyle = ink.row;
      c.fillRect(LEFT, y + this.#row - 1, width - LEFT - this.#right, 1);
      c.fillStyle = running[slot] ? ink.text : ink.faint;
      const closed = this.#effective > 0 && slot >= this.#effective;
      c.fillText(running[slot] || (closed ? 'closed' : isStatic ? 'idle' : 'free'), width - this.#right + 10, middle);
    }
  }

  #actualBars(c, bars, X) {
    // When each slot was last free before a request got it: its waiting is drawn from there on.
    const ends = new Map();
    for (const { segments } of bars) {
      for (const { slot, to } of segments) if (slot >= 0) ends.set(slot, [...(ends.get(slot) ?? []), to]);
    }
    for (const bar of bars) this.#actualBar(c, bar, X, ends);
  }

  #actualBar(c, bar, X, ends) {
    c.globalAlpha = this.#alpha(bar.row);
    bar.segments.forEach((segment, number) => {
      const { phase, from, to } = segment, x = X(from), end = X(to);
      // A request waits for the slot that it gets afterwards; without one yet it has its own lane.
      const slot = phase === QUEUED ? bar.segments[number + 1]?.slot ?? -1 : segment.slot;
      if (slot < 0 || end < LEFT) return;
      const last = number === bar.segments.length - 1, right = last && bar.live ? end : end - 1;
      if (phase === QUEUED) this.#queued(c, bar.row, slot, X(Math.max(from, ...ends.get(slot).filter((t) => t < to))), end - 2);
      else if (phase === PREEMPTED) this.#preempted(c, slot, x, end);
      else if (phase === PREFILL) this.#prefill(c, bar.row, slot, x, Math.max(x + 2, end));
      else this.#decode(c, bar.row, slot, x, Math.max(x + 1, right));
    });
  }

  #staticBar(c, bar, X) {
    c.globalAlpha = this.#alpha(bar.row);
    const now = this.#model.now, end = X(Math.min(now, bar.end)), read = X(Math.min(now, bar.read));
    this.#decode(c, bar.row, bar.slot, read, end);
    this.#prefill(c, bar.row, bar.slot, X(bar.from), read);
    const until = X(Math.min(now, bar.idleUntil)), y = TOP + bar.slot * this.#row;
    const [top, h] = this.#flat();
    if (until - end > 2) hatch(c, end + 1, y + top, until - end - 2, h, this.#ink.idle, 5);
  }

  // Offset and height of a flat bar within its row; a tall one has 2 and the row less 5.
  #flat() { return this.#row < 16 ? [4, 6] : [5, this.#row - 11]; }

  #queued(c, row, slot, x, end) {
    if (end - x < 1.5) return;
    c.strokeStyle = this.#colour(row);
    c.lineWidth = 1;
    c.setLineDash([2, 2]);
    const [top, h] = this.#flat();
    c.strokeRect(x + 0.5, TOP + slot * this.#row + top + 0.5, end - x, h - 1);
    c.setLineDash([]);
  }

  #prefill(c, row, slot, x, end) {
    const y = TOP + slot * this.#row + 2, h = this.#row - 5;
    c.fillStyle = this.#colour(row);
    c.fillRect(x, y, end - x, h);
    hatch(c, x, y, end - x, h, this.#ink.surface, 4);
  }

  #decode(c, row, slot, x, end) {
    const [top, h] = this.#flat(), y = TOP + slot * this.#row + top;
    c.fillStyle = this.#colour(row);
    c.fillRect(x, y, Math.max(0, end - x), h);
    shapeOver(c, this.#model.user(row).shape, x, y, Math.max(0, end - x), h, this.#ink.surface);
  }

  #preempted(c, slot, x, end) {
    const y = TOP + slot * this.#row + 2, h = this.#row - 5, m = (x + end) / 2, n = y + h / 2;
    c.strokeStyle = this.#ink.danger;
    c.lineWidth = 1.5;
    c.strokeRect(x + 0.75, y + 0.75, Math.max(1, end - x - 1.5), h - 1.5);
    c.beginPath();
    c.moveTo(m - 3, n - 3);
    c.lineTo(m + 3, n + 3);
    c.moveTo(m + 3, n - 3);
    c.lineTo(m - 3, n + 3);
    c.stroke();
  }

  #lanes(c, waiting, X, y0, width) {
    const ink = this.#ink, now = this.#model.now, shown = waiting.length > LANES ? LANES - 1 : LANES;
    c.fillStyle = ink.line;
    c.fillRect(0, y0 - 4, width, 1);
    c.fillStyle = waiting.length ? ink.text : ink.faint;
    c.fillText(waiting.length ? 'Waiting' : 'Nobody waits', 0, y0 + 10);
    waiting.slice(0, shown).forEach(({ row, came }, lane) => {
      const y = y0 + lane * 20, x = Math.max(LEFT + 1, X(came)), label = `${this.#model.user(row).name}, ${seconds(now - came)}`;
      const labelWidth = c.measureText(label).width, inside = x - labelWidth - 7 < LEFT;
      c.strokeStyle = this.#colour(row);
      c.lineWidth = 1.5;
      c.setLineDash([2, 2]);
      c.strokeRect(x, y + 4, Math.max(2, X(now) - x - 1), 11);
      c.setLineDash([]);
      if (inside) { c.fillStyle = ink.surface; c.fillRect(x + 4, y + 2, labelWidth + 6, 15); }
      c.fillStyle = ink.text;
      c.fillText(label, inside ? x + 7 : x - labelWidth - 7, y + 10);
    });
    if (waiting.length > shown) {
      c.textAlign = 'right';
      c.fillStyle = ink.text;
      c.fillText(`and ${waiting.length - shown} more`, X(now), y0 + shown * 20 + 10);
      c.textAlign = 'left';
    }
  }

  #say(actual, replay, slots) {
    const now = this.#model.now, from = Math.max(0, now - SPAN);
    const spans = actual.flatMap((bar) => bar.segments.filter(({ phase }) => phase !== QUEUED && phase !== PREEMPTED).map(({ from: a, to }) => [a, to]));
    const share = { actual: busyShare(spans, slots, from, now), static: busyShare(replay.bars.map((bar) => [bar.from, Math.min(now, bar.end)]), slots, from, now) };
    for (const element of this.#note.querySelectorAll('[data-busy]')) setText(element, `${Math.round(share[element.dataset.busy] * 100)} %`);
    setText(this.#note.querySelector('[data-batch]'), String(slots));
    // A request that still stands in the calculated line has waited at least until now.
    const waits = [...replay.bars.map((bar) => bar.from - bar.came), ...replay.waiting.map((bar) => now - bar.came)];
    const calculated = median(waits), real = median(actual.filter((bar) => bar.served !== null).map((bar) => bar.served - bar.came));
    setText(this.#note.querySelector('[data-wait]'), calculated === null || real === null ? 'not known yet' : `${seconds(calculated)} instead of ${real < 0.1 ? 'under 0.1 s' : seconds(real)}`);
    const label = `Bars for each of ${slots} slots over the last 2 minutes; slots were busy ${Math.round(share.actual * 100)} % of the time. The requests table below has the facts as text.`;
    if (this.#canvas.getAttribute('aria-label') !== label) this.#canvas.setAttribute('aria-label', label);
  }
}
