// The chat page: what the socket says to what is shown, what is done to what is sent.
import { Composer } from './chat-composer.js';
import { group, quotaLine, span } from './chat-format.js';
import { bindKeys } from './chat-keys.js';
import { ChatList } from './chat-list.js';
import { banner, notice, say } from './chat-notice.js';
import { ChatSocket } from './chat-socket.js';
import { Turns } from './chat-turns.js';

const data = document.body.dataset;
const byId = (id) => document.getElementById(id);
const DOWN_SHOWN_MS = 1200;
const DOWN_LONG_MS = 20000;
const SENDING_SHOWN_MS = 300;
const MODEL_POLL_MS = 5000;

let conversationId = data.conversation || null;
// Sent, but not yet said to be saved: {clientId, message: the frame}.
let pending = null;
// The answer being written: {id, seq, text}.
let active = null;
let askedLastPosition = Number(data.lastPosition);

const socket = new ChatSocket('/ws/chat/');
const turns = new Turns();
const list = new ChatList(conversationId);
const composer = new Composer(conversationId);

// ---- sending

const newId = () => [...crypto.getRandomValues(new Uint8Array(16))].map((b) => b.toString(16).padStart(2, '0')).join('');

// kind: start {text}, again {}, edit {message_id, text}, continue {message_id}.
function ask(kind, fields = {}) {
  clearNotice();
  const clientId = newId();
  const message = { type: `generation.${kind}`, conversation_id: conversationId, client_id: clientId, ...fields };
  pending = { clientId, message };
  if (kind === 'start') turns.addPending(fields.text, clientId); else if (kind !== 'edit') composer.takeFocus();
  showState();
  setTimeout(() => { if (pending?.clientId === clientId && socket.isOpen && !reading) turns.showWaiting({ mark: 'spinner', head: 'Sending', cancel: stop }); }, SENDING_SHOWN_MS);
  if (!socket.send(message) && downSince) showDown();
  turns.toEnd();
}

function stop() {
  if (pending && !conversationId) socket.send({ type: 'generation.stop', conversation_id: null, client_id: pending.clientId });
  else if (pending || active) socket.send({ type: 'generation.stop', conversation_id: conversationId });
  if (pending && !socket.isOpen) giveBack(pending);
}

function giveBack(what) {
  if (what.message.type === 'generation.start') { turns.dropPending(what.clientId); composer.giveBack(what.message.text); }
  if (pending === what) pending = null;
  if (turns.isEmpty) byId('start').hidden = false;
  turns.hideWaiting();
  showState();
}

// After a lost connection also the last message again: another tab may have gone on with it.
function subscribe(wasAway = false) {
  socket.send({
    type: 'generation.subscribe', conversation_id: conversationId, last_seq: active?.seq ?? 0,
    message_id: active?.id ?? null, last_position: Math.max(-1, askedLastPosition - (wasAway ? 1 : 0)),
  });
}

// ---- what comes

let reading = false;
const handlers = {
  'conversation.created'({ conversation, client_id: clientId }) {
    list.refresh();
    if (conversationId || pending?.clientId !== clientId) return;
    conversationId = conversation.id;
    list.currentId = conversationId;
    history.replaceState(null, '', `/c/${conversationId}/`);
    composer.moveTo(conversationId);
    showTitle(conversation);
  },
  'conversation.updated'({ conversation, running }) {
    list.refresh();
    if (conversation.id !== conversationId) return;
    showTitle(conversation);
    // Another tab asked something here.
    if (running && !active && !pending) subscribe();
  },
  'conversation.deleted'({ conversation_id: id }) {
    list.refresh();
    if (id === conversationId && list.deletingId !== id) leave('This chat was deleted in another tab.');
  },
  'message.saved'({ message, follows }) {
    if (message.conversation_id !== conversationId) return;
    turns.upsert(message, follows);
    if (pending && message.client_id === pending.clientId) {
      // Its box is gone.
      if (pending.message.type === 'generation.edit') composer.takeFocus();
      pending = null;
    }
    if (message.state === 'streaming') {
      if (active?.id !== message.id) active = { id: message.id, seq: 0, text: '' };
      else turns.setText(active.id, active.text);
      if (!active.text && !reading) turns.showWaiting({ mark: 'next', head: 'Next', cancel: stop });
    } else {
      askedLastPosition = Math.max(askedLastPosition, message.position);
      if (active?.id === message.id) ended();
    }
    showState();
  },
  'generation.idle'({ conversation_id: id }) {
    if (id !== conversationId) return;
    if (active) ended();
    if (!pending) turns.hideWaiting();
    showState();
  },
  'generation.queued'({ conversation_id: id, ahead, estimated_wait_s: wait }) {
    if (!isOurs(id)) return;
    reading = true;
    const head = [ahead ? `${group(ahead)} ahead of you` : 'Next', ...(wait ? [`about ${span(wait)}`] : [])].join(' · ');
    turns.showWaiting({ mark: ahead ? 'queue' : 'next', head, text: 'Your message has its place in line, and keeps it if you switch chats.', cancel: stop });
    say(head, true);
  },
  'generation.reading'({ conversation_id: id, done_tokens: done, prompt_tokens: all }) {
    if (!isOurs(id)) return;
    reading = true;
    const share = all ? Math.floor((100 * done) / all) : 100;
    const head = share < 100 ? `Next. Reading your text: ${share} %` : 'Next. Reading your text';
    turns.showWaiting({ mark: 'next', head, cancel: stop });
  },
  'generation.delta'(delta) {
    if (delta.conversation_id !== conversationId) return;
    if (active?.id !== delta.message_id) return;
    if (delta.from_seq === 0) active.text = delta.text;
    else if (delta.from_seq === active.seq) active.text += delta.text;
    else if (delta.seq <= active.seq) return;
    else { active.seq = 0; subscribe(); return; }
    active.seq = delta.seq;
    turns.setText(active.id, active.text, delta.completion_tokens);
  },
  'generation.finished'({ message }) {
    if (message.conversation_id !== conversationId) return;
    turns.upsert(message);
    askedLastPosition = Math.max(askedLastPosition, message.position);
    ended();
    showContext((message.prompt_tokens ?? 0) + (message.completion_tokens ?? 0));
    const said = { complete: 'Answer finished', stopped: 'Answer stopped' }[message.state] ?? 'The answer broke off';
    say(`${said}, ${group(message.completion_tokens ?? 0)} tokens.`);
  },
  'generation.error'(error) {
    if (error.client_id !== pending?.clientId) return;
    const failed = pending;
    giveBack(failed);
    if (failed.message.type === 'generation.continue' && error.code === 'context_length_exceeded') {
      turns.markFull(failed.message.message_id);
      say(`${error.message} ${error.hint}`);
    } else if (error.code !== 'stopped') showRefusal(error, failed);
    if (failed.message.type !== 'generation.edit') composer.takeFocus();
  },
  'quota.updated'({ quota }) { showQuota(quota); },
  'error'({ code, message }) {
    if (code === 'not_found') { leave('This chat does not exist any more.'); return; }
    if (pending) giveBack(pending);
    showNotice({ kind: 'warn', icon: 'warn', head: message });
  },
};

const isOurs = (id) => id === conversationId || (pending && !conversationId);

function ended() {
  active = null;
  reading = false;
  turns.hideWaiting();
  showState();
}

// ---- what is shown

function showState() { composer.busy = turns.busy = Boolean(active || pending); if (!active && !pending) reading = false; }

function showTitle({ title, pinned }) {
  if (!document.querySelector('.chat-head .rename')) byId('title').textContent = title;
  document.title = `${title} · Blockhouse`;
  byId('pin').hidden = byId('more').hidden = false;
  byId('pin').setAttribute('aria-pressed', String(pinned));
  byId('pin').setAttribute('aria-label', pinned ? 'Unpin this chat' : 'Pin this chat');
  byId('more').dataset.menuFor = conversationId;
}

function clearNotice() { byId('notice').replaceChildren(); }

function showNotice(options) {
  byId('notice').replaceChildren(notice({ role: 'alert', ...options }));
}

function showRefusal({ code, message, hint }, { message: { type, conversation_id: _, client_id: __, ...fields } }) {
  const isNew = type === 'generation.start';
  const again = { label: 'Try again', act: () => { clearNotice(); if (isNew) composer.submit(); else ask(type.replace('generation.', ''), fields); } };
  // The box of an edit is still open, with a button of its own.
  const retry = type === 'generation.edit' ? [] : [again];
  const fresh = { label: 'New chat with this message', primary: true, act: () => { const { text } = composer; composer.text = ''; leave(); composer.text = text; composer.focus(); } };
  const parts = {
    context_length_exceeded: { kind: 'warn', icon: 'warn', head: 'This is too long for the model.', actions: conversationId && isNew ? [fresh] : [] },
    insufficient_quota: { kind: 'warn', icon: 'clock', head: 'Your tokens do not suffice.' },
    queue_full: { kind: 'warn', icon: 'clock', head: 'Too many people are waiting.', actions: retry },
    engine_unavailable: { kind: 'danger', icon: 'error', head: 'The model is not ready.', actions: retry },
    rate_limit_exceeded: { kind: 'warn', icon: 'clock', head: 'That was too fast.', actions: retry },
    conflict: { kind: 'warn', icon: 'warn', head: 'Not sent yet.' },
  }[code] ?? { kind: 'danger', icon: 'error', head: 'There is no answer.', actions: retry };
  showNotice({ text: `${message} ${hint}`.trim(), ...parts });
}

function showQuota(quota) {
  const [line, at] = quotaLine(quota);
  const wide = document.createElement('span');
  wide.className = 'only-wide';
  wide.textContent = ` · ${at}`;
  byId('quota').replaceChildren(line, wide);
  byId('quota').classList.toggle('warn-text', quota.limit_tokens !== null && quota.left_tokens < quota.limit_tokens * 0.05);
}

function showContext(used) {
  const total = Number(data.contextTokens);
  byId('context').hidden = !total || !used;
  if (!total || !used) return;
  const meter = byId('context').querySelector('meter');
  meter.max = total;
  meter.high = total * 0.8;
  meter.optimum = 0;
  meter.value = Math.min(used, total);
  const left = group(Math.max(0, total - used));
  const [wide, of] = [document.createElement('span'), document.createElement('span')];
  wide.className = of.className = 'only-wide';
  wide.textContent = 'Context: ';
  of.textContent = `of ${group(total)} `;
  byId('context').querySelector('[data-label]').replaceChildren(wide, `${left} `, of, 'tokens left');
}

// Away from a chat that is gone, to the start of a new one, in place.
function leave(why) {
  conversationId = active = pending = null;
  askedLastPosition = -1;
  list.currentId = null;
  history.replaceState(null, '', '/');
  turns.hideWaiting();
  turns.clear();
  composer.moveTo(null);
  byId('title').textContent = 'New chat';
  document.title = 'New chat · Blockhouse';
  byId('pin').hidden = byId('more').hidden = true;
  showContext(0);
  clearNotice();
  if (why) showNotice({ kind: 'neutral', icon: 'info', head: why });
  list.refresh();
  showState();
}

// ---- the connection

let downSince = 0;
let downTimer = 0;

function showDown() {
  clearTimeout(downTimer);
  const long = Date.now() - downSince > DOWN_LONG_MS;
  const text = active ? 'The answer goes on at the server; you will get the missing part.'
    : 'You can write meanwhile. A message is sent when the connection is back.';
  turns.showWaiting({ mark: 'spinner', head: 'Reconnecting', text: long ? `${text} Still no connection. Is the network or the VPN on?` : text, cancel: pending ? stop : null });
  say('Connection lost. Reconnecting.', true);
  downTimer = setTimeout(showDown, DOWN_LONG_MS);
}

socket.addEventListener('open', () => {
  const wasAway = downSince > 0;
  if (wasAway) {
    turns.hideWaiting();
    say('Connected again.');
    list.refresh();
    checkState();
  }
  downSince = 0;
  clearTimeout(downTimer);
  reading = false;
  banner('signed-out', null);
  if (conversationId) subscribe(wasAway);
  if (pending) socket.send(pending.message);
});

socket.addEventListener('down', () => {
  if (downSince) return;
  downSince = Date.now();
  downTimer = setTimeout(showDown, DOWN_SHOWN_MS);
});

socket.addEventListener('message', ({ detail }) => handlers[detail.type]?.(detail));
socket.addEventListener('refused', () => checkState());

// Still signed in? Is the model there? A page that lost its line asks over HTTP.
async function checkState() {
  let response;
  try { response = await fetch('/chat/state/', { redirect: 'manual' }); } catch { return; }
  if (response.type === 'opaqueredirect' || response.status === 401) {
    socket.stop();
    clearTimeout(downTimer);
    turns.hideWaiting();
    const href = `${data.loginUrl}?next=${encodeURIComponent(location.pathname)}`;
    banner('signed-out', { kind: 'danger', icon: 'lock', head: 'You are signed out.', text: 'Sign in again to go on. What you wrote is kept in this tab.', actions: [{ label: 'Sign in', href, primary: true }] });
    if (pending) giveBack(pending);
    return;
  }
  if (!response.ok) return;
  const state = await response.json();
  showQuota(state.quota);
  showModel(state);
}

let modelTimer = 0;
function showModel({ model, context_tokens: contextTokens }) {
  clearTimeout(modelTimer);
  if (contextTokens) data.contextTokens = contextTokens;
  if (model) { banner('model', null); return; }
  banner('model', { kind: 'warn', icon: 'clock', head: 'The model is not ready.', text: 'It is loading, or it stopped. You can read your chats; this page notices when it is back.' });
  modelTimer = setTimeout(checkState, MODEL_POLL_MS);
}

// ---- the page

composer.addEventListener('send', ({ detail: text }) => ask('start', { text }));
composer.addEventListener('stop', stop);
// What was said about a message that was thrown away is no news.
byId('draft').addEventListener('input', () => { if (!composer.text) clearNotice(); });
composer.addEventListener('recall', () => turns.editLast());
turns.addEventListener('again', () => { if (!active && !pending) ask('again'); });
turns.addEventListener('continue', ({ detail: id }) => { if (!active && !pending) ask('continue', { message_id: id }); });
turns.addEventListener('edit', ({ detail }) => { if (!active && !pending) ask('edit', detail); });
turns.addEventListener('cancel', stop);
list.addEventListener('deleted', ({ detail }) => { if (detail.id === conversationId) leave(); });
list.addEventListener('restored', ({ detail }) => { if (!conversationId && turns.isEmpty) location.assign(`/c/${detail.id}/`); });
list.addEventListener('renamed', ({ detail }) => { if (detail.id === conversationId) { byId('title').textContent = detail.title; document.title = `${detail.title} · Blockhouse`; } });
list.addEventListener('pinned', ({ detail }) => { if (detail.id === conversationId) byId('pin').setAttribute('aria-pressed', String(detail.pinned)); });
list.addEventListener('trouble', ({ detail }) => showNotice({ kind: 'warn', icon: 'warn', head: 'That did not work.', text: detail.message }));
byId('pin').addEventListener('click', (event) => list.pin(conversationId, event.currentTarget.getAttribute('aria-pressed') !== 'true'));

bindKeys({
  search: () => list.focusSearch(),
  fresh: () => location.assign('/'),
  // What is open closes; else the answer stops. Whether there was anything to do.
  escape() {
    if (list.menuIsOpen) list.closeMenu();
    else if (list.isOpenOnPhone) list.slide(false);
    else if (active || pending) stop();
    else return false;
    return true;
  },
});

const quota = byId('quota').dataset;
const orNull = (text) => (text === '' ? null : Number(text));
showQuota({ window: quota.window, limit_tokens: orNull(quota.limit), used_tokens: Number(quota.used), left_tokens: orNull(quota.left), resets_at: quota.resets });
showContext(Number(data.contextUsed));
showModel({ model: data.modelReady === 'true' });
showState();
socket.connect();
