// Before and after of changes that are not applied: memory, the last hour replayed, whom it touches.
import { drawMemoryBars } from './memory-bars.js';
import { touched } from './tuning-touches.js';
import { bytes, count, make, many, percent, seconds, setText } from './words.js';

const REPLAYED = ['slots', 'reserved_interactive_slots', 'max_model_len', 'max_running_per_owner', 'admission_headroom', 'kv_memory_share'];
const WAIT_MS = 200;
const found = (name) => document.querySelector(`[data-cell="${name}"]`);
const cell = (name, text) => setText(found(name), text);

// Blocks with what they take in bytes below.
function sized(name, blocks, eachBytes) {
  const size = bytes(blocks * eachBytes);
  if (found(name).dataset.shown === `${blocks} ${size}`) return;
  found(name).dataset.shown = `${blocks} ${size}`;
  found(name).replaceChildren(`${count(blocks)} `, make('span', { class: 'unit' }, size));
}

export class TuningPreview {
  #replayed = ''; #timer = 0;

  // `changes` are the values that are not applied yet, by setting.
  update(state, changes) {
    this.#memory(state, changes);
    const lines = touched(state, changes), list = document.querySelector('#touches');
    if (list.dataset.lines !== JSON.stringify(lines)) {
      list.dataset.lines = JSON.stringify(lines);
      list.replaceChildren(...lines.map((line) => make('li', {}, line)));
    }
    this.#replay(changes);
  }

  #memory(state, changes) {
    const { kv, slots } = state, limit = state.settings?.max_model_len, share = state.settings?.kv_memory_share?.effective;
    if (!kv?.block_size || !limit) return;
    // "auto" after a change is only known once the engine has chosen: until then as now.
    const number = (value, now) => (typeof value === 'number' ? value : now);
    const now = { slots: slots.effective, context: limit.effective, total: kv.blocks_total };
    // Another share of the memory holds as many more or fewer blocks.
    const total = typeof share === 'number' && share ? Math.floor(kv.blocks_total * number(changes.kv_memory_share, share) / share) : kv.blocks_total;
    const after = { slots: number(changes.slots, now.slots), context: Math.min(number(changes.max_model_len, now.context), total * kv.block_size), total };
    for (const [name, plan] of [['now', now], ['after', after]]) {
      plan.each = Math.ceil(plan.context / kv.block_size);
      plan.blocks = plan.slots * plan.each;
      cell(`slots-${name}`, name === 'after' && changes.slots === 'auto' ? 'auto' : count(plan.slots));
      cell(`context-${name}`, count(plan.context));
      sized(`blocks-${name}`, plan.blocks, kv.bytes_per_block);
      sized(`pool-${name}`, plan.total, kv.bytes_per_block);
      cell(`share-${name}`, percent(plan.blocks, plan.total));
      cell(`whole-${name}`, count(Math.floor(plan.total / plan.each)));
    }
    drawMemoryBars(kv, now, after);
  }

  #replay(changes) {
    const wanted = Object.fromEntries(Object.entries(changes).filter(([name]) => REPLAYED.includes(name)));
    const key = JSON.stringify(wanted);
    if (key === this.#replayed) return;
    this.#replayed = key;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(async () => {
      const ask = async (query) => {
        const response = await fetch(`${document.body.dataset.replay}?${new URLSearchParams(query)}`, { credentials: 'same-origin' });
        return response.ok ? response.json() : null;
      };
      const outcomes = await Promise.all([ask({}), ask(wanted)]).catch(() => [null, null]);
      if (key !== this.#replayed) return;
      if (!outcomes[0] || !outcomes[1]) { this.#replayed = ''; return; }
      this.#show(outcomes);
    }, WAIT_MS);
  }

  #show(outcomes) {
    cell('requests', `Last hour, ${many(outcomes[0].requests, 'request')} replayed`);
    outcomes.forEach((outcome, i) => {
      const name = i ? 'after' : 'now';
      for (const field of ['fitted', 'waited', 'refused', 'cut']) cell(`${field}-${name}`, count(outcome[field]));
      cell(`longest-${name}`, seconds(outcome.longest_s));
      cell(`p95-${name}`, seconds(outcome.p95_s));
    });
  }
}
