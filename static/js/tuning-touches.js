// Which running requests a change would touch, in sentences. None of them is ended by any.
import { count, many } from './words.js';

const SHOWN = 4;
const isRunning = (request) => request.state === 'prefill' || request.state === 'decode';

function names(requests) {
  const found = [...new Set(requests.map((request) => request.labels?.username ?? 'someone'))];
  return found.length > SHOWN ? `${found.slice(0, SHOWN - 1).join(', ')} and ${found.length - SHOWN + 1} more` : found.join(', ');
}

function perOwner(running, limit) {
  const num = new Map();
  for (const { owner } of running) num.set(owner, (num.get(owner) ?? 0) + 1);
  return running.filter(({ owner }) => num.get(owner) > limit);
}

export function touched(state, changes) {
  const running = (state.requests ?? []).filter(isRunning), lines = [], { slots, kv } = state;
  if (typeof changes.slots === 'number') {
    const over = running.length - changes.slots;
    if (over > 0) {
      const newest = [...running].sort((a, b) => a.age_s - b.age_s).slice(0, over);
      lines.push(`${many(over, 'running answer is', 'running answers are')} over ${many(changes.slots, 'slot')} (${names(newest)}): they go on to their end, and new ones wait until fewer than ${count(changes.slots)} run.`);
    } else if (changes.slots > slots.effective && state.waiting) lines.push(`${many(state.waiting, 'waiting request')} may start at once, where memory allows.`);
  }
  if (typeof changes.max_model_len === 'number') {
    const longer = running.filter((request) => request.num_prompt_tokens + request.num_output_tokens > changes.max_model_len);
    if (longer.length) lines.push(`${many(longer.length, 'running answer is', 'running answers are')} longer than ${many(changes.max_model_len, 'token')} (${names(longer)}): they keep the limit that they began with.`);
  }
  if (changes.max_running_per_owner > 0) {
    const over = perOwner(running, changes.max_running_per_owner);
    if (over.length) lines.push(`${names(over)} ${new Set(over.map(({ owner }) => owner)).size === 1 ? 'has' : 'have'} more running than ${count(changes.max_running_per_owner)}: those go on, new ones wait.`);
  }
  if (changes.enable_prefix_cache === false && kv?.blocks_cached) lines.push(`${many(kv.blocks_cached, 'cached block is', 'cached blocks are')} forgotten.`);
  if (changes.policy === 'static' && running.length) lines.push(`New requests wait until all ${many(running.length, 'running answer')} have ended.`);
  if (!lines.length && Object.keys(changes).length) lines.push('No running answer is touched.');
  return lines;
}
