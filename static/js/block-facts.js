// What one block holds, in words: for the card beside the cell and for screen readers.
import { CACHED, FREE, KEPT } from './console-model.js';
import { count, many, seconds, shortId } from './words.js';

export function blockFacts(model, block) {
  const code = model.codeAt(block), size = model.state.kv?.block_size ?? 16;
  if (code === FREE) return { name: 'Free', user: null, facts: [['Used by', 'nobody'], ['Holds', 'nothing']] };
  if (code === KEPT) return { name: 'Kept free', user: null, facts: [['Used by', 'nobody'], ['Kept for', 'the growth of running answers'], ['Setting', 'Head-room for growth']] };
  if (code === CACHED) return { name: 'Cached', user: null, facts: [['Used by', 'nobody now'], ['Kept for', 'a prompt that starts the same'], ['If needed', 'given away, oldest first']] };
  const rows = model.holdersOf(block), from = model.positions[block], filled = model.partial.get(block) ?? size;
  const tokens = ['Holds tokens', filled ? `${count(from)}–${count(from + filled - 1)}` : 'none yet'];
  if (filled && filled < size) tokens[1] += `, ${filled} of ${size}`;
  const num = model.holders.get(code)?.length ?? 0;
  if (num !== 1) {
    const names = [...new Set(rows.map((row) => model.user(row).name))];
    const shown = names.length > 4 ? `${names.slice(0, 3).join(', ')} and ${names.length - 3} more` : names.join(', ');
    return { name: 'Shared', user: null, facts: [['Used by', shown || 'requests that just began'], ['Requests', count(num)], tokens, ['Saved', many(num - 1, 'copy', 'copies')]] };
  }
  const row = rows[0], user = model.user(row);
  if (!row) return { name: user.name, user, facts: [tokens] };
  return {
    name: user.name, user,
    facts: [['Request', `${shortId(row.id)}, ${row.from}`], tokens, ['Own blocks', count(row.own ?? 0)], ['Running for', seconds(model.now - row.since)]],
  };
}
