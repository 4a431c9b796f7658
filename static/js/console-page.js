// The live page: joins socket, model and views. Draws only after an update, at most four a second.
import { Banner } from './banner.js';
import { BlockLegend } from './block-legend.js';
import { BlockTable } from './block-table.js';
import { BlockMap } from './blockmap.js';
import { killRequest } from './console-api.js';
import { ConsoleModel } from './console-model.js';
import { ConsoleSocket } from './console-socket.js';
import { Plots } from './plots.js';
import { PrefixTable } from './prefix-table.js';
import { RequestsTable } from './requests-table.js';
import { SlotsControl } from './slots-control.js';
import { Timeline } from './timeline.js';
import { toast } from './toast.js';
import { EventList, Vitals } from './vitals.js';
import { setText, shortId } from './words.js';

const scheme = location.protocol === 'https:' ? 'wss:' : 'ws:';
const model = new ConsoleModel();
const socket = new ConsoleSocket(`${scheme}//${location.host}${document.body.dataset.socket}`);
const banner = new Banner(model, socket);
const pickRow = (row) => isolate(row ? { kind: 'request', key: row.handle } : null);
const map = new BlockMap(model, pickRow);
const legend = new BlockLegend(model, isolate);
const blockTable = new BlockTable(model, () => isolate(null));
const timeline = new Timeline(model);
const plots = new Plots(model);
const table = new RequestsTable(model, { kill, onPick: pickRow });
const prefixes = new PrefixTable(model), slots = new SlotsControl(model);
const vitals = new Vitals(model), events = new EventList(model);
let only = null, paused = false;

// One user, one request or one kind of block alone; pressing it again shows all.
function isolate(wanted) {
  const same = wanted && only && wanted.kind === only.kind && wanted.key === only.key;
  only = same ? null : wanted;
  for (const view of [map, legend, blockTable, timeline, table]) view.only = only;
}

async function kill(row) {
  await killRequest(row.id);
  toast(`${shortId(row.id)} of ${model.user(row).name} was killed.`, { text: 'What was written stays in the chat.' });
}

function draw() {
  vitals.update();
  legend.update();
  map.ranked = legend.order;
  map.draw();
  blockTable.update();
  timeline.draw();
  events.update();
  plots.update();
  table.update();
  prefixes.update();
  slots.update();
}

socket.addEventListener('update', ({ detail }) => {
  if (!model.apply(detail)) { socket.resync(); return; }
  if (only?.kind === 'request' && !model.rows.has(only.key)) isolate(null);
  document.querySelector('#live').removeAttribute('aria-busy');
  banner.heard();
  draw();
});

// Nothing is sent to a page that nobody sees, or that is paused.
const pauseButton = document.querySelector('#pause');
function applyPause() {
  if (paused || document.hidden) socket.pause();
  else socket.resume();
  banner.paused = paused;
}
pauseButton.addEventListener('click', () => {
  paused = !paused;
  pauseButton.setAttribute('aria-pressed', String(paused));
  setText(pauseButton.querySelector('[data-label]'), paused ? 'Go on' : 'Pause');
  applyPause();
});
document.addEventListener('visibilitychange', applyPause);
for (const input of document.querySelectorAll('[name="map-order"]')) {
  input.addEventListener('change', () => { map.byUser = input.value === 'owner'; });
}
for (const input of document.querySelectorAll('[name="map-colour"]')) {
  input.addEventListener('change', () => { map.byRequest = table.byRequest = input.value === 'request'; });
}
socket.connect();
