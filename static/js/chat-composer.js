// The message box: grows with its text, sends, keeps the draft of each chat in this tab.
const drafts = {
  get(key) { try { return sessionStorage.getItem(key) ?? ''; } catch { return ''; } },
  set(key, text) {
    try {
      if (text) sessionStorage.setItem(key, text); else sessionStorage.removeItem(key);
    } catch { /* storage may be forbidden or full */ }
  },
};

const grows = CSS.supports('field-sizing', 'content');
const touch = matchMedia('(pointer: coarse)');

// As high as its text.
export function fit(field) {
  if (grows) return;
  field.style.height = 'auto';
  field.style.height = `${field.scrollHeight}px`;
}

// On a screen keyboard Enter is a new line.
export const sendsOn = (event) => event.key === 'Enter' && !event.shiftKey && !event.isComposing && !touch.matches;

export class Composer extends EventTarget {
  #form = document.getElementById('composer');
  #field = document.getElementById('draft');
  #send = document.getElementById('send');
  #stop = document.getElementById('stop');
  #key;
  #busy = false;

  // Events: "send" (detail: text), "stop", "recall": arrow up in an empty box.
  constructor(conversationId) {
    super();
    this.#key = `draft:${conversationId || 'new'}`;
    // What was typed before this script came stays.
    if (this.text) this.#changed(); else this.text = drafts.get(this.#key);
    this.#form.addEventListener('submit', (event) => { event.preventDefault(); this.#submit(); });
    this.#stop.addEventListener('click', () => this.dispatchEvent(new Event('stop')));
    this.#field.addEventListener('input', () => this.#changed());
    this.#field.addEventListener('keydown', (event) => {
      if (sendsOn(event)) { event.preventDefault(); this.#submit(); }
      if (event.key === 'ArrowUp' && !this.text) { event.preventDefault(); this.dispatchEvent(new Event('recall')); }
    });
    if (!touch.matches) this.#field.focus();
  }

  get text() { return this.#field.value; }

  set text(value) { this.#field.value = value; this.#changed(); }

  set busy(value) {
    this.#busy = value;
    this.#stop.hidden = !value;
    this.#changed();
  }

  // The chat got its address: the draft goes with it.
  moveTo(conversationId) {
    drafts.set(this.#key, '');
    this.#key = `draft:${conversationId || 'new'}`;
    this.#changed();
  }

  // Text that was not taken comes back, before what was written since.
  giveBack(text) {
    this.text = this.text.trim() ? `${text}\n\n${this.text}` : text;
  }

  focus() { this.#field.focus(); }

  // For a button that is about to go; a screen keyboard must not come up for it.
  takeFocus() { if (!touch.matches) this.#field.focus(); }

  submit() { this.#submit(); }

  #submit() {
    const text = this.text;
    if (this.#busy || !text.trim()) return;
    this.text = '';
    this.dispatchEvent(new CustomEvent('send', { detail: text }));
  }

  #changed() {
    this.#send.disabled = this.#busy || !this.text.trim();
    drafts.set(this.#key, this.text);
    fit(this.#field);
  }
}
