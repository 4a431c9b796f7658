// A message of one's own as a box: what is sent from it takes the place of the message and of all after it.
import { fit, sendsOn } from './chat-composer.js';

const clone = (id) => document.getElementById(id).content.firstElementChild.cloneNode(true);

export class EditBox {
  #article;
  #form = clone('tpl-edit');
  #field = this.#form.querySelector('textarea');
  #send = this.#form.querySelector('[type="submit"]');
  #shown;
  #busy = false;
  #left;

  // `send` gets the new text, `left` is called when the box is gone by itself.
  constructor(article, { send, left }) {
    this.#article = article;
    this.#left = left;
    this.#shown = [...article.children];
    for (const part of this.#shown) part.hidden = true;
    this.#field.value = article.querySelector('[data-text]').textContent;
    this.#form.querySelector('[data-help]').textContent = this.#consequence();
    this.#form.addEventListener('submit', (event) => { event.preventDefault(); this.#submit(send); });
    this.#form.addEventListener('keydown', (event) => this.#onKey(event, send));
    this.#form.querySelector('[data-cancel]').addEventListener('click', () => this.close());
    this.#field.addEventListener('input', () => this.#changed());
    article.append(this.#form);
    this.#changed();
    this.#field.focus();
    this.#field.setSelectionRange(this.#field.value.length, this.#field.value.length);
    this.#form.scrollIntoView({ block: 'nearest' });
  }

  // While an answer is asked for or written nothing can be sent; what was sent stays until it is taken.
  set busy(value) {
    this.#busy = value;
    if (!value) this.#field.readOnly = false;
    this.#changed();
  }

  close() {
    this.#form.remove();
    for (const part of this.#shown) part.hidden = false;
    this.#left();
    this.#article.querySelector('[data-act="edit"]').focus();
  }

  isOf(article) { return article === this.#article; }

  #consequence() {
    const turns = [...this.#article.parentElement.querySelectorAll('.turn')];
    const after = turns.length - 1 - turns.indexOf(this.#article);
    if (after < 2) return after ? 'The answer is replaced.' : '';
    return `The ${after} messages after it are replaced.`;
  }

  #submit(send) {
    if (this.#send.disabled) return;
    this.#field.readOnly = true;
    send(this.#field.value);
  }

  #onKey(event, send) {
    if (event.isComposing) return;
    if (event.key === 'Escape' && !this.#field.readOnly) {
      event.preventDefault();
      this.close();
    } else if (event.target === this.#field && sendsOn(event)) {
      event.preventDefault();
      this.#submit(send);
    }
  }

  #changed() {
    this.#send.disabled = this.#busy || !this.#field.value.trim();
    fit(this.#field);
  }
}
