// The tuning page: edit, see the consequences, apply together, go back with one press.
import { tune } from './console-api.js';
import { toast } from './toast.js';
import { complaint, follow, put, same, showNow, valueOf, words } from './tuning-fields.js';
import { TuningPreview } from './tuning-preview.js';
import { many, setText } from './words.js';

const LOOK_EVERY_MS = 3000;
const find = (selector, root = document) => root.querySelector(selector);
const rows = [...document.querySelectorAll('[data-setting]')];
const asked = new Map(), applyButton = find('#apply'), discardButton = find('#discard');
const preview = new TuningPreview();
let version = document.body.dataset.version, state = null, busy = false;

const settingOf = (name) => (name === 'slots' ? state?.slots : state?.settings?.[name]);

const putRow = (row, value) => put(row, value, settingOf(row.dataset.setting)?.effective);

const changes = () => {
  const found = {};
  for (const row of rows) {
    const name = row.dataset.setting, value = valueOf(row);
    if (asked.has(name) && value !== undefined && !same(value, asked.get(name))) found[name] = value;
  }
  return found;
};
const wrong = () => rows.filter((row) => valueOf(row) === undefined);

function showRow(row) {
  const name = row.dataset.setting, setting = settingOf(name), value = valueOf(row), why = find('[data-why]', row);
  if (!setting) return;
  showNow(row, setting.effective);
  const changed = value !== undefined && !same(value, asked.get(name));
  setText(find('[data-change]', row), changed ? `${words(asked.get(name))} → ${words(value)}` : '');
  let text = complaint(row);
  if (!text && !changed && !same(setting.requested, setting.effective)) text = `${words(setting.effective)}, ${setting.requested === 'auto' ? 'chosen by the server' : `not ${words(setting.requested)}`}${setting.reason ? `: ${setting.reason}` : ''}.`;
  why.hidden = !text;
  why.classList.toggle('is-chosen', value !== undefined && setting.requested === 'auto');
  setText(why.lastElementChild, text);
}

function draw() {
  if (!state) return;
  rows.forEach(showRow);
  const found = changes(), number = Object.keys(found).length, pending = find('#pending');
  pending.hidden = !number;
  setText(pending.lastElementChild, `${many(number, 'change')} not applied`);
  applyButton.disabled = !number || busy || wrong().length > 0;
  setText(applyButton, number ? `Apply ${many(number, 'change')}` : 'Apply');
  discardButton.hidden = !number && !wrong().length;
  preview.update(state, found);
}

// New values of the engine. What nobody edits follows; an edit stays and is compared anew.
function take(newState) {
  const edited = new Set(Object.keys(changes()).concat(wrong().map((row) => row.dataset.setting)));
  state = newState;
  for (const row of rows) {
    const name = row.dataset.setting, setting = settingOf(name);
    if (!setting) continue;
    asked.set(name, setting.requested);
    if (!edited.has(name)) putRow(row, setting.requested);
  }
  if (!edited.size) version = state.settings_version;
  draw();
}

async function look() {
  try {
    const response = await fetch(document.body.dataset.engine, { credentials: 'same-origin' });
    if (response.ok && !busy) take(await response.json());
  } catch { /* the next look tells */ }
}

// The list of past changes is the server's words: taken from the page as it is now.
async function showHistory() {
  const response = await fetch(location.href, { credentials: 'same-origin' }).catch(() => null);
  if (!response?.ok) return;
  const fresh = new DOMParser().parseFromString(await response.text(), 'text/html').querySelector('#history');
  if (fresh) find('#history').replaceWith(document.adoptNode(fresh));
}

function complain(error) {
  find('#conflict').hidden = error?.status !== 409;
  const refused = find('#refused');
  refused.hidden = !error || error.status === 409;
  if (error) setText(find('p', refused), error.message);
}

async function send(wanted, done, why = '') {
  busy = true;
  draw();
  complain(null);
  try {
    const newState = await tune(wanted, version, why);
    for (const row of rows) if (row.dataset.setting in wanted) putRow(row, wanted[row.dataset.setting]);
    version = newState.settings_version;
    state = newState;
    find('#why').value = '';
    done();
    showHistory();
  } catch (error) {
    complain(error);
    if (error.status === 409) {
      const response = await fetch(document.body.dataset.engine, { credentials: 'same-origin' }).catch(() => null);
      // The new values are shown from here on, so applying once more is no longer unseen.
      if (response?.ok) { take(await response.json()); version = state.settings_version; }
    }
  } finally {
    busy = false;
    if (state) take(state);
  }
}

for (const row of rows) {
  row.addEventListener('input', (event) => {
    follow(row, event.target);
    draw();
  });
}
applyButton.addEventListener('click', () => {
  const wanted = changes(), before = Object.fromEntries(Object.keys(wanted).map((name) => [name, asked.get(name)]));
  send(wanted, () => toast(`${many(Object.keys(wanted).length, 'change')} applied.`, {
    text: 'It holds from now on.', undo: () => send(before, () => toast('Taken back.'), 'taken back'),
  }), find('#why').value.trim());
});
// What a capacity test found: put into its field, so that the preview shows it before anybody applies it.
find('[data-suggest]')?.addEventListener('click', ({ target }) => {
  const row = rows.find((one) => one.dataset.setting === 'slots');
  putRow(row, Number(target.dataset.suggest));
  draw();
  find('.input', row).focus();
});
discardButton.addEventListener('click', () => {
  complain(null);
  for (const row of rows) putRow(row, asked.get(row.dataset.setting));
  version = state.settings_version;
  draw();
});
document.addEventListener('click', (event) => {
  const back = event.target.closest('[data-back]');
  if (back) send(JSON.parse(back.dataset.back), () => toast('Gone back to before.'), `back to before ${find('time', back.closest('tr')).textContent}`);
});
look();
setInterval(() => { if (!document.hidden) look(); }, LOOK_EVERY_MS);
