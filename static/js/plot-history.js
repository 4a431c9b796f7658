// Plotted numbers of a longer time, asked of the server; the last 15 minutes come with the updates.
const NAME = 'plot-range';
const SECONDS = { '15m': 900, '1h': 3600, '24h': 86400, '7d': 7 * 86400 };
const WORDS = { '15m': '15 min', '1h': '1 h', '24h': '24 h', '7d': '7 days' };
// A point stands for this long, so asking more often would show nothing new.
const ASK_EVERY_MS = { '1h': 10_000, '24h': 60_000, '7d': 300_000 };

export class PlotHistory {
  #model; #range = '15m'; #rows = []; #columns = []; #askedAt = 0; #onNews; #pointS = 1;

  constructor(model, onNews) {
    this.#model = model;
    this.#onNews = onNews;
    for (const input of document.querySelectorAll(`[name="${NAME}"]`)) {
      input.addEventListener('change', () => { this.#range = input.value; this.#rows = []; this.#askedAt = 0; this.#onNews(); this.refresh(); });
      if (input.checked) this.#range = input.value;
    }
  }

  get span() { return SECONDS[this.#range]; }
  get words() { return WORDS[this.#range]; }
  get isLive() { return this.#range === '15m'; }
  // More seconds than this between two rows are a gap in the line.
  get gap() { return this.isLive ? 5 : this.#pointS * 2.5; }
  get rows() { return this.isLive ? this.#model.samples : this.#rows; }
  column(name) { return (this.isLive ? this.#model.columns : this.#columns).indexOf(name); }

  async refresh() {
    const range = this.#range, now = Date.now();
    if (this.isLive || now - this.#askedAt < ASK_EVERY_MS[range]) return;
    this.#askedAt = now;
    let told = null;
    try {
      const response = await fetch(`${document.body.dataset.load}?range=${range}`, { credentials: 'same-origin' });
      if (response.ok) told = await response.json();
    } catch { /* the next try tells; the page says elsewhere that the server is away */ }
    if (!told || range !== this.#range) return;
    this.#columns = told.columns;
    this.#pointS = told.point_s;
    this.#rows = told.rows.map(([at, ...values]) => [at - this.#model.epoch, ...values]);
    this.#onNews();
  }
}
