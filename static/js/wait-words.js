// Why one request waits, in few words: what the engine found when it last looked for room.
import { count, many } from './words.js';

export function waitWords(row, state) {
  if (row.ended !== null || !row.wait) return '';
  const [why, needed, available, kept] = row.wait, settings = state.settings ?? {};
  if (state.state && state.state !== 'ready') return 'the server starts nothing now';
  if (why === 'slots') return (state.slots?.effective === 1 ? 'the only slot is taken' : `all ${many(state.slots?.effective ?? 0, 'slot')} are taken`);
  if (why === 'reserved') return `the free slots are kept for chat (${count(settings.reserved_interactive_slots?.effective ?? 0)})`;
  if (why === 'owner') return 'its user is at the own limit';
  if (why === 'batch') return 'the running batch must end first';
  if (why === 'memory') return `needs ${many(needed, 'block')}, ${count(available)} free${kept ? `, ${count(kept)} of them kept for growth` : ''}`;
  return row.position ? 'one before it waits for memory' : 'starts with the next step';
}
