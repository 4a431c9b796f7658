// Numbers and times in words, as the visual language asks.
export const group = (number) => Math.round(number).toLocaleString('en-US');

export function seconds(s) {
  if (s < 0.095) return `${Math.max(1, Math.round(s * 100)) / 100} s`;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 90) return `${Math.round(s)} s`;
  return span(s);
}

// "3 h 12 min", "12 min", "40 s"
export function span(s) {
  if (s < 90) return `${Math.max(1, Math.round(s))} s`;
  const minutes = Math.round(s / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export const clock = (iso) => new Date(iso).toLocaleTimeString([], { hour: '2-digit', minute: '2-digit', hour12: false });

const tokens = (n) => `${group(n)} token${n === 1 ? '' : 's'}`;

// "TTFT 0.4 s · 38 tok/s · 186 tokens". `earlier` are tokens made before this time began.
export function speedLine({ ttft_s: ttft, duration_s: duration, completion_tokens: made, earlier }, soFar = false) {
  const parts = [];
  if (ttft !== null && ttft !== undefined) parts.push(`TTFT ${seconds(ttft)}`);
  const writing = (duration ?? 0) - (ttft ?? 0);
  if (made > 1 && writing > 0.02) {
    const rate = (made - 1) / writing;
    parts.push(`${rate < 10 ? rate.toFixed(1) : group(rate)} tok/s`);
  }
  if (made) parts.push(tokens(made + (earlier ?? 0)) + (soFar ? ' so far' : ''));
  return parts.join(' · ');
}

export function quotaLine({ window: over, limit_tokens: limit, used_tokens: used, left_tokens: left, resets_at: resets }) {
  const at = over === 'month' ? `resets on ${new Date(resets).toLocaleDateString('en', { day: 'numeric', month: 'short' })}` : `resets at ${clock(resets)}`;
  if (limit === null) return [`${group(used)} tokens used today, no limit`, at];
  return [`${group(left)} of ${group(limit)} tokens left ${over === 'month' ? 'this month' : 'today'}`, at];
}
