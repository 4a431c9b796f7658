// "By user": block ids sorted by user in the legend's order, then shared, cached, free.
import { CACHED, FREE } from './console-model.js';

export function cellOrder(model, rankedUsers) {
  const { codes, positions, holders, rows } = model, total = codes.length;
  const rankOfUser = new Map(rankedUsers.map((key, rank) => [key, rank]));
  // Codes in the order of their cells; equal users stand together, their requests one after another.
  const found = model.countByCode();
  const sortKey = (code) => {
    if (code === FREE) return [3, 0, 0];
    if (code === CACHED) return [2, 0, 0];
    const handles = holders.get(code) ?? [];
    if (handles.length !== 1) return [1, code, 0];
    return [0, rankOfUser.get(rows.get(handles[0])?.owner) ?? rankedUsers.length, handles[0]];
  };
  const ordered = [...found.keys()].map((code) => [code, sortKey(code)])
    .sort(([, a], [, b]) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2]);
  const begin = new Map();
  let at = 0;
  for (const [code] of ordered) { begin.set(code, at); at += found.get(code); }
  const order = new Int32Array(total), next = new Map(begin);
  for (let i = 0; i < total; i++) {
    const place = next.get(codes[i]);
    order[place] = i;
    next.set(codes[i], place + 1);
  }
  for (const [code] of ordered) {
    if (code < 0) continue;
    const from = begin.get(code);
    order.subarray(from, from + found.get(code)).sort((a, b) => positions[a] - positions[b]);
  }
  return order;
}
