// Beginnings of prompts that were found again: whose, how long, how often, and what that saved.
import { count, make, mark, setText } from './words.js';

export class PrefixTable {
  #model; #body = document.querySelector('#prefixes'); #empty = document.querySelector('#prefixes-empty'); #shown = '';

  constructor(model) { this.#model = model; }

  update() {
    const { state, users } = this.#model, rows = state.prefixes ?? [];
    const owners = rows.map(([owner]) => users.get(owner));
    const key = JSON.stringify([rows, owners]);
    if (key !== this.#shown) {
      this.#shown = key;
      this.#body.replaceChildren(...rows.map((row, at) => this.#row(row, owners[at])));
    }
    this.#body.closest('.table-wrap').hidden = !rows.length;
    this.#empty.hidden = rows.length > 0;
    const isOff = state.settings?.enable_prefix_cache?.effective === false;
    setText(this.#empty, isOff ? 'The prefix cache is switched off: every prompt is computed from its start. Tuning has the switch.' : 'None yet: no prompt has begun like an earlier one.');
  }

  #row([owner, tokens, times, saved], user) {
    const whose = owner === '' ? 'everybody: the team’s instructions' : user?.name ?? 'someone';
    const name = owner === '' || !user ? [whose] : [mark(user), whose];
    return make('tr', {}, make('td', {}, make('span', { class: 'user' }, ...name)), ...[tokens, times, saved].map((number) => make('td', { class: 'r' }, count(number))));
  }
}
