// Numbers and times as the console writes them, and small DOM helpers (text only, never markup).
const grouped = new Intl.NumberFormat('en-US', { maximumFractionDigits: 0 });
export const count = (n) => grouped.format(n);

export const rate = (perSecond) => (perSecond > 0 && perSecond < 9.95 ? perSecond.toFixed(1) : count(perSecond));

export const many = (n, one, several = `${one}s`) => `${count(n)} ${n === 1 ? one : several}`;

// Two significant digits are enough for a time.
export function seconds(s) {
  if (s === null || s === undefined) return '–';
  if (s < 0.0005) return '0 s';
  if (s < 0.095) return `${Math.round(s * 1000)} ms`;
  if (s < 9.95) return `${s.toFixed(1)} s`;
  if (s < 100) return `${Math.round(s)} s`;
  return s < 5400 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`;
}

export function bytes(n) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) { n /= 1024; unit += 1; }
  return `${n >= 100 || unit === 0 || Number.isInteger(n) ? Math.round(n) : n.toFixed(1)} ${units[unit]}`;
}

// As much of a request's id as anybody can tell apart at a glance.
export const shortId = (id) => id.slice(0, 8);

export function percent(part, whole) {
  if (!whole) return '–';
  const share = part / whole * 100;
  return share > 0 && share < 0.5 ? '<1 %' : `${Math.round(share)} %`;
}

export function clock(unix) {
  return new Date(unix * 1000).toLocaleTimeString('en-GB', { hour12: false });
}

// Writes only what changed, so that selections and screen readers are left alone.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const SVG = 'http://www.w3.org/2000/svg';

export function svg(tag, attributes = {}) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

export function icon(name) {
  const element = svg('svg', { class: 'icon', 'aria-hidden': 'true' });
  element.append(svg('use', { href: `${document.body.dataset.icons}#${name}` }));
  return element;
}

export function mark(user) {
  return make('span', { class: 'user-mark', 'data-hue': user.hue, 'data-shape': user.shape, 'aria-hidden': 'true' });
}
