// Speed in all against time to first token, a point a level. SVG, so that it reads and prints as text;
// a curve that turns back, as after the knee, is drawn as it is.
import { rate, seconds, svg } from './words.js';

const HEIGHT = 300, LEFT = 58, TOP = 28, BOTTOM = 256, EDGE = 22, LETTER = 7, LINE = 15;
const read = (id) => JSON.parse(document.getElementById(id)?.textContent ?? 'null');

function text(content, attributes) {
  const element = svg('text', attributes);
  element.textContent = content;
  return element;
}

// Round steps, and the first of them at or above the highest value.
function ticks(high, most) {
  const raw = high / most, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((part) => part * power).find((part) => part >= raw * 0.999);
  const number = Math.ceil(high / step - 0.001);
  return Array.from({ length: number + 1 }, (_, i) => i * step);
}

function scales(charts, width) {
  const points = charts.flatMap((chart) => chart.points), limit = charts[0].limit ?? 0;
  const slowest = Math.max(...points.map((point) => point.ttft));
  // A level far over the limit must not flatten all others: it is drawn at the upper edge.
  const times = ticks(Math.max(limit ? Math.min(slowest, limit * 4) : slowest, limit * 1.1, 0.001) * 1.05, 4);
  const speeds = ticks(Math.max(...points.map((point) => point.speed), 0.1) * 1.02, width < 700 ? 5 : 7);
  const most = times.at(-1), fastest = speeds.at(-1), right = width - EDGE;
  return {
    times, speeds, right, most,
    x: (speed) => LEFT + (speed / fastest) * (right - LEFT),
    y: (ttft) => BOTTOM - (Math.min(ttft, most) / most) * (BOTTOM - TOP),
  };
}

function axes(chart, { x, y, times, speeds, right, most }) {
  const parts = [];
  for (const ttft of times) {
    parts.push(svg('path', { class: 'grid', d: `M${LEFT} ${y(ttft)}H${right}` }));
    const words = ttft === 0 ? '0 s' : ttft < 0.1 ? `${Math.round(ttft * 1000)} ms` : `${Number(ttft.toFixed(2))} s`;
    parts.push(text(words, { class: 'axis', x: LEFT - 8, y: y(ttft) + 4, 'text-anchor': 'end' }));
  }
  for (const speed of speeds) parts.push(text(String(Number(speed.toFixed(2)).toLocaleString('en-US')), { class: 'axis', x: x(speed), y: BOTTOM + 18, 'text-anchor': 'middle' }));
  parts.push(text('tok/s in all', { class: 'axis', x: right, y: BOTTOM + 38, 'text-anchor': 'end' }));
  parts.push(text('TTFT p95', { class: 'axis', x: LEFT, y: 14 }));
  if (chart.limit && chart.limit <= most) {
    const at = y(chart.limit);
    parts.unshift(svg('rect', { class: 'good', x: LEFT, y: at, width: right - LEFT, height: BOTTOM - at }));
    parts.push(svg('path', { class: 'limit', d: `M${LEFT} ${at}H${right}` }));
    parts.push(text(`limit ${seconds(chart.limit)}`, { class: 'limit-label', x: LEFT + 8, y: at - 6 }));
    if (BOTTOM - at > 24) parts.push(text('acceptable', { class: 'good-label', x: LEFT + 8, y: at + 16 }));
  }
  return parts;
}

const placed = (points, { x, y }) => points.map((point) => ({ ...point, x: x(point.speed), y: y(point.ttft) }));
const curve = (points) => points.map((point, i) => `${i ? 'L' : 'M'}${point.x.toFixed(1)} ${point.y.toFixed(1)}`).join('');

// In a narrow chart the figures stay in the table.
function words(point, chart, isNarrow) {
  const names = [point.users === chart.knee && 'the knee', point.users === chart.best && 'the best'].filter(Boolean);
  if (!point.good) return `${point.users}: too slow`;
  const label = names.length ? `${point.users}: ${names.join(' and ')}` : String(point.users);
  return point.users === chart.best && !isNarrow ? `${label}, ${rate(point.speed)} tok/s at ${seconds(point.ttft)}` : label;
}

// Small boxes along the curve and around its points: where a label would be hard to read.
function obstacles(points) {
  const found = [];
  points.forEach((point, i) => {
    found.push({ left: point.x - 9, right: point.x + 9, top: point.y - 9, bottom: point.y + 9 });
    const next = points[i + 1];
    for (let step = 1; next && step < 24; step += 1) {
      const x = point.x + ((next.x - point.x) * step) / 24, y = point.y + ((next.y - point.y) * step) / 24;
      found.push({ left: x - 2, right: x + 2, top: y - 2, bottom: y + 2 });
    }
  });
  return found;
}

const overlap = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;

// The first of the places around a point where the label lies on nothing; else the first inside.
function place(point, content, taken, right) {
  const width = content.length * LETTER;
  const boxes = [];
  for (const far of [0, 1, 2]) {
    for (const [left, y] of [
      [point.x - width / 2, point.y - 13 - far * LINE], [point.x - width / 2, point.y + 24 + far * LINE],
      [point.x - width - 13, point.y - 8 - far * LINE], [point.x + 13, point.y - 8 - far * LINE],
      [point.x - width - 13, point.y + 18 + far * LINE], [point.x + 13, point.y + 18 + far * LINE],
    ]) boxes.push({ left, right: left + width, top: y - 12, bottom: y + 3, y });
  }
  const inside = boxes.filter((box) => box.left > LEFT && box.right < right + EDGE && box.top > 0 && box.bottom < BOTTOM);
  return inside.find((box) => !taken.some((other) => overlap(box, other))) ?? inside[0] ?? boxes[0];
}

function marks(chart, points, before, right) {
  const parts = [], taken = [...obstacles(points), ...obstacles(before)];
  for (const point of points) {
    if (point.users === chart.knee) parts.push(svg('circle', { class: 'halo', cx: point.x, cy: point.y, r: 10 }));
    if (point.good) parts.push(svg('circle', { class: point.users === chart.best ? 'dot knee' : 'dot', cx: point.x, cy: point.y, r: 5 }));
    else parts.push(svg('path', { class: 'bad-mark', d: `m${point.x - 5} ${point.y - 5} 10 10m0-10-10 10` }));
  }
  // The longest labels first: they have the fewest places.
  const labels = points.map((point) => [point, words(point, chart, right < 560)]).sort((a, b) => b[1].length - a[1].length);
  for (const [point, content] of labels) {
    const box = place(point, content, taken, right);
    taken.push(box);
    parts.push(text(content, { class: point.users === chart.best ? 'label strong' : 'label', x: (box.left + box.right) / 2, y: box.y, 'text-anchor': 'middle' }));
  }
  return parts;
}

const inWords = (chart) => `Speed in all against time to first token. ${chart.points.map((point) => `${point.users} at the same time: ${rate(point.speed)} tokens a second, ${seconds(point.ttft)}${point.good ? '' : ', too slow'}${point.users === chart.knee ? ', the knee' : ''}`).join('. ')}.`;

function draw(holder, chart, other) {
  const width = Math.max(360, holder.clientWidth), scale = scales(other ? [chart, other] : [chart], width);
  const picture = svg('svg', { class: 'chart', viewBox: `0 0 ${width} ${HEIGHT}`, role: 'img', 'aria-label': inWords(chart) });
  const points = placed(chart.points, scale), before = other ? placed(other.points, scale) : [];
  picture.append(...axes(chart, scale));
  if (other) picture.append(svg('path', { class: 'line before', d: curve(before) }));
  picture.append(svg('path', { class: 'line', d: curve(points) }), ...marks(chart, points, before, scale.right));
  holder.replaceChildren(picture);
}

export function drawChart() {
  const holder = document.getElementById('chart'), chart = read('chart-data'), other = read('chart-other');
  if (!holder || !chart?.points.length) {
    holder?.closest('figure').remove();
    return;
  }
  let drawn = 0;
  new ResizeObserver(() => {
    if (holder.clientWidth === drawn) return;
    drawn = holder.clientWidth;
    draw(holder, chart, other?.points.length ? other : null);
  }).observe(holder);
}
