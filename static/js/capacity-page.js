// The capacity test's page: the running test once a second, the chart, Apply, and how long a test takes.
import { drawChart } from './capacity-chart.js';
import { tune } from './console-api.js';
import { toast } from './toast.js';
import { icon, make, many, seconds, setText } from './words.js';

const LOOK_EVERY_MS = 1000;
const find = (id) => document.getElementById(id);

function span(s) {
  const whole = Math.round(s);
  return whole < 60 ? `${whole} s` : `${Math.floor(whole / 60)} min${whole % 60 ? ` ${whole % 60} s` : ''}`;
}

// ---- the form

const form = find('capacity-form'), start = find('start');

function estimate() {
  const levels = new Set(form.elements.levels.value.split(/[,\s]+/).filter((part) => /^[1-9]\d{0,2}$/.test(part)));
  // One more level may be added where the limit is crossed; each ends with answers still to begin.
  const total = (levels.size + 1) * Number(form.elements.level_s.value) * 1.1;
  setText(start, levels.size ? `Start test, about ${total < 90 ? `${Math.ceil(total / 10) * 10} s` : `${Math.round(total / 60)} min`}` : 'Start test');
}
form.addEventListener('input', estimate);
form.addEventListener('submit', () => { start.disabled = true; });
addEventListener('pageshow', () => { start.disabled = 'status' in document.body.dataset; });
estimate();

// ---- the running test

function step(tone, words, right, isCurrent = false) {
  const item = make('li', isCurrent ? { 'aria-current': 'step' } : {});
  const sign = tone === 'busy' ? make('span', { class: 'spinner', 'aria-hidden': 'true' }) : make('span', tone === 'done' ? { class: 'ok-text' } : {}, icon(tone === 'done' ? 'check' : 'clock'));
  item.append(sign, make('span', {}, words), make('span', {}, right));
  return item;
}

function steps({ done, levels, progress, level_s }) {
  const now = progress.users, items = [];
  if (done.length) items.push(step('done', `${done.map((level) => level.users).join(', ')} at the same time`, `TTFT p95 ${done.map((level) => seconds(level.ttft_p95_s)).join(', ')}`));
  if (now && !done.some((level) => level.users === now)) {
    const soFar = progress.ttft_p95_s === null ? `${progress.answered} answered` : `TTFT p95 ${seconds(progress.ttft_p95_s)} so far`;
    items.push(step('busy', `${now} at the same time`, `${soFar}, ${Math.round(progress.level_elapsed_s)} of ${Math.round(level_s)} s`, true));
  }
  const left = levels.filter((users) => users > (now ?? 0) && !done.some((level) => level.users === users));
  if (left.length) items.push(step('wait', `${left.join(', ')} at the same time, then a finer step where the limit is crossed`, 'not started'));
  return items;
}

function note({ progress, is_stopping }) {
  if (is_stopping) return 'Stopping. What was measured is kept.';
  if (progress.members_waiting) return `${many(progress.members_waiting, 'member waits', 'members wait')}. The test sends nothing until they are served, and does not count that time.`;
  if (progress.members_running) return `${many(progress.members_running, 'answer for a member runs', 'answers for members run')}. When a member has to wait, the test waits too.`;
  return progress.errors ? `${many(progress.errors, 'request')} failed so far at this level.` : '';
}

function drawRun(told) {
  const { progress, status } = told;
  const words = status === 'queued' ? 'Waiting for the worker' : progress.users ? `Running: ${progress.users} at the same time` : 'Running: warming up';
  setText(find('run-head'), words);
  setText(find('run-sub'), progress.users ? `level ${progress.level} of ${progress.levels} · ${span(progress.elapsed_s)} so far` : '');
  find('run-progress').value = 100 * (progress.share ?? 0);
  find('run-steps').replaceChildren(...steps(told));
  setText(find('run-note'), note(told));
  find('run-left').hidden = !told.is_left;
  find('stop').disabled = told.is_stopping;
}

async function follow() {
  try {
    const response = await fetch(document.body.dataset.status, { credentials: 'same-origin' });
    if (response.ok) {
      const told = await response.json();
      if (!told.is_open) { location.assign(location.pathname); return; }
      drawRun(told);
    } else if (response.status === 404) { location.assign(location.pathname); return; }
  } catch { setText(find('run-note'), 'The server does not answer at the moment; the page keeps asking.'); }
  setTimeout(follow, LOOK_EVERY_MS);
}

if (document.body.dataset.status) {
  drawRun(JSON.parse(find('run-status').textContent));
  setTimeout(follow, LOOK_EVERY_MS);
}

// ---- the result

drawChart();

const apply = find('apply');

async function setSlots(slots, done) {
  apply.disabled = true;
  find('refused').hidden = true;
  try {
    const state = await tune({ slots }, document.body.dataset.version, apply.dataset.why);
    document.body.dataset.version = state.settings_version;
    done(state.slots);
  } catch (error) {
    find('refused').hidden = false;
    setText(find('refused').querySelector('p'), error.status === 409 ? 'Somebody changed the settings meanwhile. Load this page again and look at them first.' : error.message);
    apply.disabled = false;
  }
}

apply?.addEventListener('click', () => {
  const { before } = apply.dataset, wanted = Number(apply.dataset.slots);
  setSlots(wanted, (slots) => {
    setText(apply, 'Applied');
    apply.classList.remove('primary');
    const less = slots.effective < wanted ? `${slots.effective} fit: ${slots.reason}.` : 'It holds from now on.';
    toast(`Slots set to ${wanted}.`, {
      text: less,
      undo: before ? () => setSlots(/^\d+$/.test(before) ? Number(before) : before, () => { setText(apply, `Apply ${many(wanted, 'slot')}`); apply.classList.add('primary'); apply.disabled = false; toast('Taken back.'); }) : null,
    });
  });
});
