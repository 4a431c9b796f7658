// The log: messages, the answer that grows, what is waited for, and following the end.
import { EditBox } from './chat-edit.js';
import { speedLine } from './chat-format.js';
import { copyText, notice, say, waiting } from './chat-notice.js';
import { renderInto } from './markdown.js';

const AT_END_PX = 48;
const clone = (id) => document.getElementById(id).content.firstElementChild.cloneNode(true);
const number = (text) => (text === '' || text === undefined ? null : Number(text));

export class Turns extends EventTarget {
  #log = document.getElementById('log');
  #list = document.getElementById('turns');
  #start = document.getElementById('start');
  #newText = document.getElementById('new-text');
  #wait = waiting();
  #following = true;
  #top = 0;
  #height = 0;
  #answers = new Map(); // article -> {text, message}
  #dirty = new Set();
  #frame = 0;
  #costMs = 0;
  #drawnAt = 0;
  #box = null; // the message that is being edited
  #busy = false;

  // Events: "again", "continue" {id}, "edit" {message_id, text}, "cancel".
  constructor() {
    super();
    for (const article of this.#list.querySelectorAll('[data-role="assistant"]')) this.#adopt(article);
    this.#log.addEventListener('scroll', () => this.#noteScroll(), { passive: true });
    // Said before the view has moved: a frame drawn meanwhile must not pull it back.
    this.#log.addEventListener('wheel', (event) => { if (event.deltaY < 0) this.#following = false; }, { passive: true });
    this.#newText.addEventListener('click', () => this.toEnd());
    this.#list.addEventListener('click', (event) => this.#onClick(event));
    new ResizeObserver(() => this.#settle()).observe(this.#log);
    this.#markLast();
    this.toEnd();
    this.#toFound();
    addEventListener('hashchange', () => this.#toFound());
  }

  // "#m12" in the address: a search found its words in that message.
  #toFound() {
    const article = /^#m\d+$/.test(location.hash) ? this.find(location.hash.slice(2)) : null;
    if (!article) return;
    this.#list.querySelector('.is-found')?.classList.remove('is-found');
    article.classList.add('is-found');
    this.#following = false;
    article.scrollIntoView({ block: 'nearest' });
    article.addEventListener('pointerdown', () => article.classList.remove('is-found'), { once: true });
    // What is searched again is found again.
    history.replaceState(null, '', location.pathname);
  }

  // ---- messages

  // Position of the last message that is complete, for asking what was missed.
  get lastPosition() {
    const whole = [...this.#list.querySelectorAll('[data-position]')].filter((a) => a.dataset.state !== 'streaming');
    return whole.length ? Number(whole.at(-1).dataset.position) : -1;
  }

  // While something is asked or written nothing else can be asked.
  set busy(value) {
    this.#busy = value;
    this.#list.classList.toggle('is-busy', value);
    if (this.#box) this.#box.busy = value;
    // Buttons came or went.
    this.#settle();
  }

  editLast() {
    const last = [...this.#list.querySelectorAll('.from-user[data-id]')].at(-1);
    if (last) this.#edit(last);
  }

  #edit(article) {
    if (this.#busy) return;
    this.#box?.close();
    this.#box = new EditBox(article, {
      send: (text) => this.dispatchEvent(new CustomEvent('edit', { detail: { message_id: Number(article.dataset.id), text } })),
      left: () => { this.#box = null; },
    });
  }

  get isEmpty() { return !this.#list.querySelector('.turn'); }

  // Shown before the server has it; `upsert` gives it its number.
  addPending(text, clientId) {
    const article = clone('tpl-user');
    article.dataset.clientId = clientId;
    article.classList.add('is-pending');
    article.querySelector('[data-text]').textContent = text;
    this.#place(article);
    this.toEnd();
  }

  dropPending(clientId) {
    this.#pending(clientId)?.remove();
    this.#settle();
  }

  #pending(clientId) {
    return clientId ? this.#list.querySelector(`[data-client-id="${CSS.escape(clientId)}"]:not([data-id])`) : null;
  }

  find(id) { return this.#list.querySelector(`[data-id="${id}"]`); }

  // `follows`: position of the message before it. What is shown between the two was replaced.
  upsert(message, follows = message.position) {
    for (const article of this.#list.querySelectorAll('[data-position]')) {
      const position = Number(article.dataset.position);
      if (position > follows && position < message.position) this.#remove(article);
    }
    if (message.role === 'user') return this.#upsertUser(message);
    let article = this.find(message.id);
    if (!article) {
      article = clone('tpl-answer');
      article.dataset.id = message.id;
      this.#place(article);
      this.#answers.set(article, { text: '', message });
    }
    article.dataset.position = message.position;
    article.dataset.state = message.state;
    const answer = this.#answers.get(article);
    const live = message.state === 'streaming';
    if (answer.message.state !== message.state) answer.firstAt = 0;
    answer.message = message;
    if (!live) answer.text = message.content;
    this.#show(article, live);
    this.#markLast();
    this.#settle();
    return article;
  }

  #upsertUser(message) {
    const article = this.find(message.id) ?? this.#pending(message.client_id) ?? clone('tpl-user');
    if (!article.isConnected) this.#place(article);
    article.classList.remove('is-pending');
    article.dataset.id = message.id;
    article.dataset.position = message.position;
    article.dataset.state = message.state;
    article.querySelector('[data-text]').textContent = message.content;
    this.#settle();
    return article;
  }

  setText(id, text, madeSoFar) {
    const article = this.find(id);
    const answer = this.#answers.get(article);
    if (!answer) return;
    if (!answer.firstAt && madeSoFar) { answer.firstAt = performance.now(); this.hideWaiting(); say(answer.message.completion_tokens ? 'The answer goes on.' : 'The answer has started.'); }
    answer.text = text;
    answer.made = madeSoFar;
    this.#dirty.add(article);
    this.#schedule();
  }

  clear() {
    this.#list.replaceChildren();
    this.#answers.clear();
    this.#box = null;
    this.#start.hidden = false;
    this.#newText.hidden = true;
  }

  #place(article) {
    this.#start.hidden = true;
    if (this.#wait.node.isConnected) this.#wait.node.before(article); else this.#list.append(article);
  }

  #remove(article) {
    if (this.#box?.isOf(article)) this.#box = null;
    this.#answers.delete(article);
    article.remove();
  }

  // A message that the server drew.
  #adopt(article) {
    const data = article.dataset;
    const body = article.querySelector('[data-text]');
    const message = {
      state: data.state, finish_reason: data.finishReason, error: data.error,
      ttft_s: number(data.ttftS), duration_s: number(data.durationS),
      prompt_tokens: number(data.promptTokens), completion_tokens: number(data.completionTokens),
    };
    this.#answers.set(article, { text: body.textContent, message });
    body.replaceChildren();
    body.classList.remove('plain');
    this.#show(article, data.state === 'streaming');
  }

  // ---- drawing an answer

  #show(article, live) {
    const { text, message } = this.#answers.get(article);
    const body = article.querySelector('[data-text]');
    article.toggleAttribute('aria-busy', live);
    if (live) article.setAttribute('aria-busy', 'true');
    body.classList.toggle('live', live);
    renderInto(body, text);
    article.classList.toggle('is-blank', live && !text);
    article.querySelector('[data-speed]').textContent = live ? '' : speedLine(message);
    article.querySelector('[data-after]').replaceChildren(...(live ? [] : this.#afterword(article)));
  }

  // The server found no room for more in this chat.
  markFull(id) {
    const article = this.find(id);
    if (!this.#answers.has(article)) return;
    this.#answers.get(article).isFull = true;
    this.#show(article, false);
    this.#settle();
  }

  // Why an answer is no whole one, and what to do about it.
  #afterword(article) {
    const { text, message, isFull } = this.#answers.get(article);
    const goOn = { label: 'Continue', act: () => this.dispatchEvent(new CustomEvent('continue', { detail: Number(article.dataset.id) })), primary: true };
    const again = { label: 'Answer again', act: () => this.dispatchEvent(new Event('again')), primary: !text };
    const kept = text ? 'The answer stopped here.' : 'There is no answer.';
    const room = Number(document.body.dataset.contextTokens) || Infinity;
    if (text && (isFull || (message.prompt_tokens ?? 0) + (message.completion_tokens ?? 0) >= room)) {
      return [notice({ kind: 'neutral', icon: 'info', head: 'This chat is full: the model can read no more of it. Start a new chat to go on.', actions: [{ label: 'New chat', href: '/', primary: true }] })];
    }
    const actions = text ? [goOn] : [];
    if (message.state === 'error') {
      return [notice({ kind: 'danger', icon: 'error', head: kept, text: message.error, actions: [...actions, again] })];
    }
    if (message.state === 'interrupted') {
      return [notice({ kind: 'warn', icon: 'warn', head: kept, text: message.error, actions: [...actions, again] })];
    }
    if (message.state === 'stopped') {
      return [notice({ kind: 'neutral', icon: 'stop', head: message.error || (text ? 'You stopped this answer.' : 'You stopped it before the first word.'), actions: actions.map((each) => ({ ...each, primary: false })) })];
    }
    if (message.finish_reason === 'length') {
      return [notice({ kind: 'neutral', icon: 'info', head: 'The answer reached its longest length.', actions })];
    }
    return [];
  }

  // At most once a frame, and never more than a quarter of the time on drawing.
  #schedule() {
    if (this.#frame) return;
    const rest = Math.max(0, this.#drawnAt + 4 * this.#costMs - performance.now());
    const draw = () => { this.#frame = requestAnimationFrame(() => this.#draw()); };
    if (rest > 20) { this.#frame = setTimeout(draw, rest); } else draw();
  }

  #draw() {
    this.#frame = 0;
    const began = performance.now();
    for (const article of this.#dirty) {
      const answer = this.#answers.get(article);
      if (!answer || article.dataset.state !== 'streaming') continue;
      article.classList.toggle('is-blank', !answer.text);
      renderInto(article.querySelector('[data-text]'), answer.text);
      const writing = (performance.now() - (answer.firstAt ?? began)) / 1000;
      article.querySelector('[data-speed]').textContent = speedLine(
        { ttft_s: 0, duration_s: writing, completion_tokens: answer.made, earlier: answer.message.completion_tokens }, true).replace(/^TTFT[^·]*· /, '');
    }
    this.#dirty.clear();
    this.#drawnAt = performance.now();
    this.#costMs = this.#drawnAt - began;
    this.#settle(true);
  }

  #markLast() {
    const answers = [...this.#list.querySelectorAll('.turn')];
    answers.forEach((article, i) => {
      article.classList.toggle('is-last', i === answers.length - 1);
    });
  }

  // ---- waiting

  showWaiting(options) {
    this.#wait.show(options);
    if (this.#list.lastElementChild !== this.#wait.node) this.#list.append(this.#wait.node);
    this.#settle();
  }

  hideWaiting() { this.#wait.node.remove(); }

  // ---- the end

  toEnd() {
    this.#following = true;
    this.#newText.hidden = true;
    this.#log.scrollTop = this.#log.scrollHeight;
  }

  // Moving up leaves the end, moving down to it follows again. A log that became shorter moved nobody.
  #noteScroll() {
    const { scrollHeight, scrollTop, clientHeight } = this.#log;
    if (scrollTop < this.#top && scrollHeight >= this.#height) this.#following = false;
    else if (scrollTop > this.#top && scrollHeight - scrollTop - clientHeight < AT_END_PX) this.#following = true;
    if (this.#following) this.#newText.hidden = true;
    this.#top = scrollTop;
    this.#height = scrollHeight;
  }

  #settle(grew = false) {
    if (this.#following) this.#log.scrollTop = this.#log.scrollHeight;
    else if (grew) this.#newText.hidden = false;
  }

  // ---- buttons in messages

  #onClick(event) {
    const button = event.target.closest('button[data-act]');
    if (!button) return;
    const article = button.closest('.turn');
    if (button.dataset.act === 'edit') this.#edit(article);
    if (button.dataset.act === 'again') this.dispatchEvent(new Event('again'));
    if (button.dataset.act === 'cancel') this.dispatchEvent(new Event('cancel'));
    if (button.dataset.act === 'copy') {
      const body = article.querySelector('[data-text]');
      this.#copied(button, copyText(this.#answers.get(article)?.text ?? body.textContent, body));
    }
    if (button.dataset.act === 'copy-code') {
      const code = button.closest('.code-block').querySelector('code');
      this.#copied(button, copyText(code.textContent, code));
    }
  }

  async #copied(button, copying) {
    const done = await copying;
    say(done ? 'Copied.' : 'Selected. Press Ctrl C to copy.');
    const label = button.querySelector('[data-label]');
    const use = button.querySelector('use');
    const icon = use.getAttribute('href').replace(/#.*/, '');
    if (label) label.textContent = done ? 'Copied' : 'Press Ctrl+C';
    if (done) use.setAttribute('href', `${icon}#check`);
    setTimeout(() => {
      if (label) label.textContent = 'Copy';
      use.setAttribute('href', `${icon}#copy`);
    }, 1600);
  }
}
