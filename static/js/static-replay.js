// Bars of the slots timeline: what happened, and the same requests under static batching, where a
// batch starts together and every slot stays taken until the batch's longest answer ends.
import { PREEMPTED, QUEUED } from './console-model.js';

// One bar a request: segments {phase, slot, from, to} that ran, and when it came and was served.
export function actualBars(model) {
  const bars = [];
  for (const row of model.rows.values()) {
    const flat = row.segments ?? [], end = row.ended ?? model.now, segments = [];
    let served = null;
    for (let at = 0; at < flat.length; at += 3) {
      const [phase, slot, from] = flat.slice(at, at + 3), to = Math.max(from, flat[at + 5] ?? end);
      if (phase !== QUEUED && phase !== PREEMPTED) served ??= from;
      segments.push({ phase, slot, from, to });
    }
    if (segments.length) bars.push({ row, segments, came: row.since, served, end, live: row.ended === null });
  }
  return bars;
}

// Seconds a bar computed something, prompt and answer, without waiting or being preempted.
function work(bar) {
  const ran = { prefill: 0, decode: 0 };
  for (const { phase, from, to } of bar.segments) {
    if (phase === QUEUED || phase === PREEMPTED) continue;
    ran[phase === 1 ? 'prefill' : 'decode'] += to - from;
  }
  return ran;
}

export function staticReplay(actual, slots, now) {
  const line = actual.filter((bar) => bar.served !== null).sort((a, b) => a.came - b.came);
  const bars = [];
  let clock = line[0]?.came ?? 0, next = 0;
  // Without an engine there are no slots, and a batch of none would never end the line.
  while (slots > 0 && next < line.length) {
    clock = Math.max(clock, line[next].came);
    if (clock >= now) break;
    const batch = [];
    while (batch.length < slots && next < line.length && line[next].came <= clock) batch.push(line[next++]);
    const works = batch.map(work), longest = Math.max(...works.map((w) => w.prefill + w.decode));
    batch.forEach((bar, slot) => {
      const read = clock + works[slot].prefill, end = read + works[slot].decode;
      bars.push({ row: bar.row, slot, came: bar.came, from: clock, read, end, idleUntil: clock + longest });
    });
    clock += longest;
  }
  const waiting = [...line.slice(next).filter((bar) => slots > 0 || bar.live), ...actual.filter((bar) => bar.served === null && bar.live)];
  return { bars, waiting: waiting.map((bar) => ({ row: bar.row, came: bar.came })) };
}

// Share of all slots' time in the window that computed something; counted, never typed.
export function busyShare(spans, slots, from, to) {
  const ran = spans.reduce((sum, [a, b]) => sum + Math.max(0, Math.min(to, b) - Math.max(from, a)), 0);
  return to > from && slots ? Math.min(1, ran / ((to - from) * slots)) : 0;
}

export function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : null;
}
