// The fields of the tuning page: a number with a slider, a switch, a choice, shares of kinds of requests.
import { setText } from './words.js';

const find = (selector, root) => root.querySelector(selector);
// Also the order in which they are written.
const KINDS = { interactive: 'chat', api: 'scripts', background: 'background' };
export const STRICT = 'strict';

// A kind that is not named weighs 1.
const whole = (shares) => Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, shares[kind] ?? 1]));
const isShares = (value) => typeof value === 'object' && value !== null;

export const same = (a, b) => (isShares(a) && isShares(b) ? Object.keys(KINDS).every((kind) => whole(a)[kind] === whole(b)[kind]) : a === b);

export function words(value) {
  if (typeof value === 'boolean') return value ? 'on' : 'off';
  if (value === STRICT) return 'in order';
  if (isShares(value)) return Object.entries(whole(value)).map(([kind, weight]) => `${KINDS[kind]} ${words(weight)}`).join(', ');
  return typeof value === 'number' ? value.toLocaleString('en-US') : String(value);
}

function numberOf(field) {
  const text = field.value.trim();
  if (!/^\d+([.]\d+)?$/.test(text)) return undefined;
  return Number(text) >= Number(field.dataset.low) && Number(text) <= Number(field.dataset.high) ? Number(text) : undefined;
}

function sharesOf(row) {
  if (find('select', row).value === STRICT) return STRICT;
  const shares = Object.fromEntries([...row.querySelectorAll('[data-class]')].map((field) => [field.dataset.class, numberOf(field)]));
  return Object.values(shares).includes(undefined) ? undefined : shares;
}

// The value in a row's field, or undefined when it is none.
export function valueOf(row) {
  const { kind } = row.dataset;
  if (kind === 'switch') return find('[type=checkbox]', row).checked;
  if (kind === 'choice') return find('select', row).value;
  if (kind === 'shares') return sharesOf(row);
  const field = find('.input', row);
  if (field.dataset.word && field.value.trim().toLowerCase() === field.dataset.word) return field.dataset.word;
  return numberOf(field);
}

// The field that holds what does not work, if one does.
const wrongField = (row) => [...row.querySelectorAll('.input')].find((field) => numberOf(field) === undefined) ?? find('.input', row);

// Why the row's value is none, in words; marks the field.
export function complaint(row) {
  const isWrong = valueOf(row) === undefined, wrong = isWrong ? wrongField(row) : null;
  for (const field of row.querySelectorAll('.input')) field.setAttribute('aria-invalid', String(field === wrong));
  if (!wrong) return '';
  const { low, high, word } = wrong.dataset;
  return `“${wrong.value}” does not work here: ${words(Number(low))} to ${words(Number(high))} is allowed${word ? `, or ${word}` : ''}.`;
}

// `effective` is where the slider stands while the server chooses.
export function put(row, value, effective) {
  const { kind } = row.dataset;
  if (kind === 'switch') find('[type=checkbox]', row).checked = value;
  else if (kind === 'choice') find('select', row).value = value;
  else if (kind === 'shares') {
    find('select', row).value = isShares(value) ? 'shares' : STRICT;
    for (const field of row.querySelectorAll('[data-class]')) field.value = String(isShares(value) ? whole(value)[field.dataset.class] : 1);
    follow(row);
  } else {
    find('.input', row).value = String(value);
    find('[type=range]', row).value = String(typeof value === 'number' ? value : effective ?? 0);
  }
}

// One part of a field was changed by hand: the others follow.
export function follow(row, changed) {
  const range = find('[type=range]', row), field = find('.input', row);
  if (row.dataset.kind === 'shares') find('.shares', row).hidden = find('select', row).value === STRICT;
  else if (changed === range && range) field.value = range.value;
  else if (range) range.value = field.value;
}

export function showNow(row, value) { setText(find('[data-now]', row), words(value)); }
