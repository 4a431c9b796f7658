// Plots of the chosen time (uPlot): thin lines, few ticks, direct labels, units always.
import uPlot from '../vendor/uplot-1.6.32.esm.js';
import { token } from './canvas.js';
import { niceTop } from './chart-scale.js';
import { PlotHistory } from './plot-history.js';
import { SPECS, nowWords } from './plot-specs.js';
import { count, setText } from './words.js';

const HEIGHT = 126;
const LETTER = 6.2;

export class Plots {
  #model; #history; #plots = new Map(); #drawnAt = -1;

  constructor(model) {
    this.#model = model;
    this.#history = new PlotHistory(model, () => { this.#drawnAt = -1; this.update(); });
    const observer = new ResizeObserver((entries) => {
      for (const { target } of entries) this.#plots.get(target)?.setSize({ width: target.clientWidth, height: HEIGHT });
    });
    for (const holder of document.querySelectorAll('[data-plot]')) observer.observe(holder);
    addEventListener('themechange', () => this.#rebuild());
  }

  // Samples come once a second; between them nothing is drawn.
  update() {
    const at = this.#model.last('t');
    if (at === null) return;
    this.#history.refresh();
    if (at === this.#drawnAt || (!this.#history.isLive && this.#drawnAt !== -1)) return;
    this.#drawnAt = at;
    if (!this.#plots.size) this.#build();
    for (const [holder, plot] of this.#plots) this.#fill(holder, plot);
  }

  #rebuild() {
    for (const plot of this.#plots.values()) plot.destroy();
    this.#plots.clear();
    this.#drawnAt = -1;
    this.update();
  }

  #build() {
    for (const holder of document.querySelectorAll('[data-plot]')) {
      const spec = SPECS[holder.dataset.plot];
      this.#plots.set(holder, new uPlot(this.#options(spec, holder), [[0], ...spec.columns.map(() => [null])], holder));
    }
  }

  #options(spec, holder) {
    const font = `11px ${token('--font')}`, grid = { stroke: token('--plot-grid'), width: 1 }, quiet = token('--text-3');
    const scale = spec.scale ?? 1, shown = (v) => (Number.isInteger(v) ? count(v) : String(Math.round(v * 100) / 100));
    const names = Math.max(0, ...(spec.labels ?? []).map((label) => label.length));
    return {
      width: holder.clientWidth, height: HEIGHT, legend: { show: false },
      cursor: { show: false }, select: { show: false },
      padding: [8, names ? 8 + Math.ceil(names * LETTER) : 8, 0, 0],
      scales: { x: { time: false }, y: { range: (plot, low, high) => [0, spec.most ?? niceTop((high ?? 0) * scale, spec.least * scale, spec.whole) / scale] } },
      axes: [
        { grid: { show: false }, ticks: { show: false }, size: 18, values: () => [] },
        { stroke: quiet, font, grid, ticks: { show: false }, size: 38, gap: 6, splits: (plot) => [0, plot.scales.y.max / 2, plot.scales.y.max], values: (plot, splits) => splits.map((v) => shown(v * scale)) },
      ],
      series: [{}, ...spec.columns.map((_, i) => ({
        stroke: token(i ? '--plot-line-2' : '--plot-line'), width: 1.6, dash: i ? [5, 3] : undefined, points: { show: false }, spanGaps: false,
        fill: spec.fill ? token('--plot-fill') : undefined, paths: spec.step ? uPlot.paths.stepped({ align: 1 }) : undefined,
      }))],
      hooks: { draw: [(plot) => this.#edges(plot, spec, font, quiet)] },
    };
  }

  // Time labels at both ends, inside the plot's width, and the series' names where lines end.
  #edges(plot, spec, font, quiet) {
    const c = plot.ctx, ratio = devicePixelRatio || 1, { left, top, width, height } = plot.bbox, right = left + width;
    c.save();
    c.font = font.replace('11px', `${11 * ratio}px`);
    c.textBaseline = 'middle';
    c.fillStyle = quiet;
    c.textAlign = 'left';
    c.fillText(`−${this.#history.words}`, left, top + height + 11 * ratio);
    c.textAlign = 'right';
    c.fillText('now', right, top + height + 11 * ratio);
    c.textAlign = 'left';
    for (const { label, i, y } of this.#ends(plot, spec, ratio)) {
      c.fillStyle = token(i ? '--plot-line-2' : '--plot-line');
      c.fillText(label, right + 4 * ratio, y);
    }
    c.restore();
  }

  #ends(plot, spec, ratio) {
    const ends = (spec.labels ?? []).map((label, i) => {
      const value = plot.data[i + 1].findLast((v) => v !== null);
      return value === undefined ? null : { label, i, y: plot.valToPos(value, 'y', true) };
    }).filter(Boolean);
    if (ends.length === 2 && Math.abs(ends[0].y - ends[1].y) < 12 * ratio) {
      const middle = (ends[0].y + ends[1].y) / 2, first = ends[0].y < ends[1].y ? -1 : 1;
      ends[0].y = middle + first * 6 * ratio;
      ends[1].y = middle - first * 6 * ratio;
    }
    return ends;
  }

  #fill(holder, plot) {
    const spec = SPECS[holder.dataset.plot], history = this.#history, at = 0, now = this.#model.now;
    const indexes = spec.columns.map((name) => history.column(name));
    const times = [], series = spec.columns.map(() => []);
    let before = null;
    for (const sample of history.rows) {
      // A gap in the samples is a gap in the line, not a slope across it.
      if (before !== null && sample[at] - before > history.gap) { times.push(before + 1); for (const values of series) values.push(null); }
      before = sample[at];
      times.push(before);
      indexes.forEach((column, i) => series[i].push(sample[column] ?? null));
    }
    plot.batch(() => {
      plot.setData(times.length ? [times, ...series] : [[now], ...series.map(() => [null])], false);
      plot.setScale('x', { min: now - history.span, max: now });
    });
    const newest = this.#model.samples.at(-1) ?? [], live = spec.columns.map((name) => [newest[this.#model.column(name)] ?? null]);
    const text = nowWords(spec, live);
    setText(holder.parentElement.querySelector('.now'), text);
    holder.setAttribute('aria-label', `${spec.what}, last ${history.words}; now ${text}`);
  }
}
