// Plots of the last 15 minutes (uPlot): thin lines, few ticks, direct labels, units always.
import uPlot from '../vendor/uplot-1.6.32.esm.js';
import { token } from './canvas.js';
import { niceTop } from './chart-scale.js';
import { count, rate, seconds, setText } from './words.js';

const HEIGHT = 126, SPAN = 15 * 60;

const PLOTS = {
  speed: { columns: ['decode'], least: 50, fill: true, now: ([speed]) => `${rate(speed)} tok/s`, what: 'Tokens written a second' },
  ttft: { columns: ['ttft_p50', 'ttft_p95'], least: 1, labels: ['p50', 'p95'], now: ([p50, p95]) => `p50 ${seconds(p50)} · p95 ${seconds(p95)}`, what: 'Time to first token' },
  queue: { columns: ['waiting'], least: 4, fill: true, step: true, whole: true, now: ([n]) => (n === 1 ? '1 request' : `${count(n)} requests`), what: 'Waiting requests' },
  kv: { columns: ['kv'], least: 100, most: 100, fill: true, now: ([share]) => `${Math.round(share)} %`, what: 'KV memory in use' },
};

export class Plots {
  #model; #plots = new Map(); #drawnAt = -1;

  constructor(model) {
    this.#model = model;
    const observer = new ResizeObserver((entries) => {
      for (const { target } of entries) this.#plots.get(target)?.setSize({ width: target.clientWidth, height: HEIGHT });
    });
    for (const holder of document.querySelectorAll('[data-plot]')) observer.observe(holder);
    addEventListener('themechange', () => this.#rebuild());
  }

  // Samples come once a second; between them nothing is drawn.
  update() {
    const at = this.#model.last('t');
    if (at === null || at === this.#drawnAt) return;
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
      const plot = new uPlot(this.#options(PLOTS[holder.dataset.plot], holder), [[0], ...PLOTS[holder.dataset.plot].columns.map(() => [null])], holder);
      this.#plots.set(holder, plot);
    }
  }

  #options(spec, holder) {
    const font = `11px ${token('--font')}`, grid = { stroke: token('--plot-grid'), width: 1 }, quiet = token('--text-3');
    return {
      width: holder.clientWidth, height: HEIGHT, legend: { show: false },
      cursor: { show: false }, select: { show: false },
      padding: [8, spec.labels ? 28 : 8, 0, 0],
      scales: { x: { time: false }, y: { range: (plot, low, high) => [0, spec.most ?? niceTop(high ?? 0, spec.least, spec.whole)] } },
      axes: [
        { grid: { show: false }, ticks: { show: false }, size: 18, values: () => [] },
        { stroke: quiet, font, grid, ticks: { show: false }, size: 38, gap: 6, splits: (plot) => [0, plot.scales.y.max / 2, plot.scales.y.max], values: (plot, splits) => splits.map((v) => (Number.isInteger(v) ? count(v) : String(Math.round(v * 100) / 100))) },
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
    c.fillText('−15 min', left, top + height + 11 * ratio);
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
      const middle = (ends[0].y + ends[1].y) / 2;
      ends[0].y = middle + 6 * ratio;
      ends[1].y = middle - 6 * ratio;
    }
    return ends;
  }

  #fill(holder, plot) {
    const spec = PLOTS[holder.dataset.plot], { samples } = this.#model, at = this.#model.column('t');
    const indexes = spec.columns.map((name) => this.#model.column(name));
    const times = [], series = spec.columns.map(() => []);
    let before = null;
    for (const sample of samples) {
      // A gap in the samples is a gap in the line, not a slope across it.
      if (before !== null && sample[at] - before > 5) { times.push(before + 1); for (const values of series) values.push(null); }
      before = sample[at];
      times.push(before);
      indexes.forEach((column, i) => series[i].push(sample[column]));
    }
    plot.batch(() => {
      plot.setData([times, ...series], false);
      plot.setScale('x', { min: before - SPAN, max: before });
    });
    const last = series.map((values) => values.at(-1) ?? null), text = last[0] === null ? 'none yet' : spec.now(last);
    setText(holder.parentElement.querySelector('.now'), text);
    holder.setAttribute('aria-label', `${spec.what}, last 15 minutes; now ${text}`);
  }
}
