// Speed in all against time to first token, a point a level. SVG, so that it reads and prints as text;
// a curve that turns back, as after the knee, is drawn as it is.
import { niceTop } from './chart-scale.js';
import { rate, seconds, svg } from './words.js';

const WIDTH = 900, HEIGHT = 300, LEFT = 58, RIGHT = 878, TOP = 28, BOTTOM = 256;
const read = (id) => JSON.parse(document.getElementById(id)?.textContent ?? 'null');

function text(content, attributes) {
  const element = svg('text', attributes);
  element.textContent = content;
  return element;
}

function scales(charts) {
  const points = charts.flatMap((chart) => chart.points);
  const slowest = Math.max(...points.map((point) => point.ttft)), limit = charts[0].limit ?? 0;
  // A level far over the limit must not flatten all others: it is drawn at the upper edge.
  const most = niceTop(limit ? Math.min(slowest, limit * 4) : slowest, limit * 1.25 || 0.01);
  const fastest = niceTop(Math.max(...points.map((point) => point.speed)), 1);
  return {
    most, fastest,
    x: (speed) => LEFT + (speed / fastest) * (RIGHT - LEFT),
    y: (ttft) => BOTTOM - (Math.min(ttft, most) / most) * (BOTTOM - TOP),
  };
}

function axes(chart, { x, y, most, fastest }) {
  const parts = [];
  for (let step = 0; step <= 4; step += 1) {
    const ttft = (most * step) / 4, speed = (fastest * step) / 4;
    parts.push(svg('path', { class: 'grid', d: `M${LEFT} ${y(ttft)}H${RIGHT}` }));
    parts.push(text(ttft ? seconds(ttft) : '0 s', { class: 'axis', x: LEFT - 8, y: y(ttft) + 4, 'text-anchor': 'end' }));
    parts.push(text(rate(speed), { class: 'axis', x: x(speed), y: BOTTOM + 18, 'text-anchor': 'middle' }));
  }
  parts.push(text('tok/s in all', { class: 'axis', x: RIGHT, y: BOTTOM + 38, 'text-anchor': 'end' }));
  parts.push(text('TTFT p95', { class: 'axis', x: LEFT, y: 14 }));
  if (chart.limit && chart.limit <= most) {
    const at = y(chart.limit);
    parts.unshift(svg('rect', { class: 'good', x: LEFT, y: at, width: RIGHT - LEFT, height: BOTTOM - at }));
    parts.push(svg('path', { class: 'limit', d: `M${LEFT} ${at}H${RIGHT}` }));
    parts.push(text(`limit ${seconds(chart.limit)}`, { class: 'limit-label', x: LEFT + 8, y: at - 8 }));
    parts.push(text('acceptable', { class: 'good-label', x: LEFT + 8, y: at + 18 }));
  }
  return parts;
}

const curve = (points, { x, y }) => points.map((point, i) => `${i ? 'L' : 'M'}${x(point.speed).toFixed(1)} ${y(point.ttft).toFixed(1)}`).join('');

// Beside the point where the curve comes from below or the edge is near, else above it.
function label(point, chart, at, taken) {
  const isBest = point.users === chart.best, isKnee = point.users === chart.knee;
  const words = isBest || isKnee ? `${point.users}: ${[isKnee && 'the knee', isBest && 'the best'].filter(Boolean).join(', ')}${isBest ? `, ${rate(point.speed)} tok/s at ${seconds(point.ttft)}` : ''}` : point.good ? String(point.users) : `${point.users}: too slow`;
  const isRight = at.x > (LEFT + RIGHT) / 2, long = words.length > 4;
  let y = at.y - 13;
  // Labels of points close together step down instead of lying over each other.
  while (taken.some((other) => Math.abs(other.y - y) < 14 && Math.abs(other.x - at.x) < (long || other.long ? 190 : 24))) y += 15;
  taken.push({ x: at.x, y, long });
  return text(words, { class: isBest ? 'label strong' : 'label', x: long ? at.x + (isRight ? -14 : 14) : at.x, y, 'text-anchor': long ? (isRight ? 'end' : 'start') : 'middle' });
}

function marks(chart, scale) {
  const parts = [], taken = [];
  for (const point of chart.points) {
    const at = { x: scale.x(point.speed), y: scale.y(point.ttft) };
    if (point.users === chart.knee) parts.push(svg('circle', { class: 'halo', cx: at.x, cy: at.y, r: 10 }));
    if (point.good) parts.push(svg('circle', { class: point.users === chart.best ? 'dot knee' : 'dot', cx: at.x, cy: at.y, r: 5 }));
    else parts.push(svg('path', { class: 'bad-mark', d: `m${at.x - 5} ${at.y - 5} 10 10m0-10-10 10` }));
    parts.push(label(point, chart, at, taken));
  }
  return parts;
}

const inWords = (chart) => `Speed in all against time to first token. ${chart.points.map((point) => `${point.users} at the same time: ${rate(point.speed)} tokens a second, ${seconds(point.ttft)}${point.good ? '' : ', too slow'}${point.users === chart.knee ? ', the knee' : ''}`).join('. ')}.`;

export function drawChart() {
  const holder = document.getElementById('chart'), chart = read('chart-data'), other = read('chart-other');
  if (!holder || !chart?.points.length) {
    holder?.closest('figure').remove();
    return;
  }
  const scale = scales(other?.points.length ? [chart, other] : [chart]);
  const picture = svg('svg', { class: 'chart', viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: 'img', 'aria-label': inWords(chart) });
  picture.append(...axes(chart, scale));
  if (other?.points.length) picture.append(svg('path', { class: 'line before', d: curve(other.points, scale) }));
  picture.append(svg('path', { class: 'line', d: curve(chart.points, scale) }), ...marks(chart, scale));
  holder.replaceChildren(picture);
}
