// Two bars: what all slots at the full context would take, against the memory for answers there is.
import { bytes, percent, setText, svg } from './words.js';

const WIDTH = 320, HEIGHT = 18;

export function drawMemoryBars(kv, now, after) {
  const most = Math.max(now.total, after.total, now.blocks, after.blocks);
  for (const [name, plan] of [['now', now], ['after', after]]) {
    const row = document.querySelector(`[data-bar="${name}"]`), x = (blocks) => (blocks / most * WIDTH).toFixed(1);
    const inside = Math.min(plan.blocks, plan.total), used = Math.min(kv.blocks_used, plan.total);
    const words = `${bytes(plan.blocks * kv.bytes_per_block)} of ${bytes(plan.total * kv.bytes_per_block)}`;
    setText(row.querySelector('[data-words]'), words);
    const picture = row.querySelector('svg'), key = [plan.blocks, plan.total, used, most].join();
    if (picture.dataset.key === key) continue;
    picture.dataset.key = key;
    picture.setAttribute('aria-label', `${name === 'now' ? 'Now' : 'After'}: all slots at the full context would take ${words}, ${percent(plan.blocks, plan.total)}.`);
    const box = (className, from, to) => svg('rect', { class: className, x: x(from), y: 0, width: Math.max(0, x(to) - x(from)).toFixed(1), height: HEIGHT });
    const parts = [box('pool', 0, plan.total), box('promised', 0, inside)];
    if (plan.blocks > plan.total) parts.push(box('over', plan.total, plan.blocks));
    if (name === 'now') parts.push(box('used', 0, used));
    parts.push(svg('path', { class: 'edge', d: `M${x(plan.total)} 0V${HEIGHT}` }));
    picture.replaceChildren(...parts);
  }
}
