// Parallel slots on the live page: asked, effective with its reason, preview, Apply, Undo.
import { tune } from './console-api.js';
import { toast } from './toast.js';
import { bytes, count, many, percent, setText } from './words.js';

const MOST = 4096;

export class SlotsControl {
  #model; #form = document.querySelector('#slots-form'); #field = document.querySelector('#slots-requested');
  #range = document.querySelector('#slots-range'); #apply = document.querySelector('#slots-apply');
  #discard = document.querySelector('#slots-discard'); #error = document.querySelector('#slots-error');
  #asked = null; #version = null; #edited = false; #busy = false;

  constructor(model) {
    this.#model = model;
    this.#field.addEventListener('input', () => { this.#range.value = this.#field.value; this.#edit(); });
    this.#range.addEventListener('input', () => { this.#field.value = this.#range.value; this.#edit(); });
    this.#discard.addEventListener('click', () => { this.#complain(''); this.#reset(); this.update(); });
    this.#form.addEventListener('submit', (event) => { event.preventDefault(); this.#submit(); });
  }

  update() {
    const { slots, settings_version: version } = this.#model.state;
    const badge = document.querySelector('#slots-badge');
    // Without an engine there is no number to change.
    badge.hidden = !slots?.effective;
    this.#field.disabled = this.#range.disabled = this.#busy || !slots?.effective;
    if (!slots?.effective) return;
    setText(document.querySelector('#slots-effective'), String(slots.effective));
    badge.classList.toggle('warn', slots.requested !== slots.effective && slots.requested !== 'auto');
    // Another admin's change reaches a form that nobody is editing at once; one being edited keeps
    // what it shows, and applying it then says that somebody was first.
    if (!this.#edited) { this.#asked = slots.requested; this.#version = version; this.#reset(); }
    const reason = document.querySelector('#slots-reason');
    reason.hidden = !this.#reasonWords();
    setText(reason, this.#reasonWords());
    this.#form.classList.toggle('has-warning', slots.requested !== slots.effective && slots.requested !== 'auto');
    setText(document.querySelector('#slots-preview'), this.#preview());
    this.#buttons();
  }

  #reasonWords() {
    const { slots } = this.#model.state;
    if (slots.requested === slots.effective) return '';
    const why = slots.reason ? `: ${slots.reason}` : '';
    if (slots.requested === 'auto') return `The server chooses: ${slots.effective} now${why}.`;
    return `${slots.effective}, not ${slots.requested}${why}.`;
  }

  // The number in the field, "auto", or null when it is neither.
  #value() {
    const text = this.#field.value.trim().toLowerCase();
    if (text === 'auto') return 'auto';
    return /^\d+$/.test(text) ? Number(text) : null;
  }

  #edit() {
    this.#edited = this.#value() !== this.#asked;
    this.#complain('');
    this.update();
  }

  #reset() {
    const { slots } = this.#model.state;
    this.#edited = false;
    this.#range.max = String(Math.max(16, 2 ** Math.ceil(Math.log2(Math.max(1, slots.effective) * 2))));
    if (document.activeElement !== this.#field || this.#value() !== slots.requested) this.#field.value = String(slots.requested);
    this.#range.value = String(slots.requested === 'auto' ? slots.effective : slots.requested);
  }

  #buttons() {
    const value = this.#value();
    this.#apply.disabled = !this.#edited || this.#busy;
    this.#discard.hidden = !this.#edited;
    setText(this.#apply, this.#edited && value !== null ? `Apply ${this.#asked} → ${value}` : 'Apply');
  }

  #preview() {
    const { kv, model, running = 0, slots } = this.#model.state, value = this.#value();
    if (value === null || (value !== 'auto' && (value < 1 || value > MOST))) return `1 to ${count(MOST)} slots, or auto.`;
    if (value === 'auto') return this.#edited ? 'The server chooses from the memory and the length of the requests it sees.' : '';
    const lines = [];
    if (kv && model?.context_tokens) {
      const blocks = value * Math.ceil(model.context_tokens / kv.block_size), share = percent(blocks, kv.blocks_total);
      lines.push(`${many(value, 'answer')} at the full ${count(model.context_tokens)} tokens would need ${many(blocks, 'block')} (${bytes(blocks * kv.bytes_per_block)}), ${share} of the memory for answers.`);
      if (running && kv.blocks_used) {
        const usual = Math.ceil(kv.blocks_used / running * value);
        lines.push(`At the length of those that run now, about ${count(usual)} of ${count(kv.blocks_total)}.`);
      }
    }
    if (this.#edited) lines.push(this.#touches(value, running, slots.effective));
    return lines.join(' ');
  }

  #touches(value, running, effective) {
    if (value >= running) return value > effective ? 'Waiting requests start at once where memory allows. No running answer is touched.' : 'No running answer is touched.';
    const over = running - value, newest = this.#model.running().sort((a, b) => b.since - a.since).slice(0, over);
    const names = [...new Set(newest.map((row) => this.#model.user(row).name))].slice(0, 4).join(', ');
    return `Running answers go on to their end, ${many(over, 'of them is', 'of them are')} over the new number (${names}). New ones wait until fewer than ${count(value)} run.`;
  }

  #complain(text) {
    setText(this.#error, text);
    this.#error.hidden = !text;
    this.#field.setAttribute('aria-invalid', String(Boolean(text)));
  }

  async #submit() {
    const value = this.#value(), before = this.#asked;
    if (!this.#edited || this.#busy) return;
    if (value === null) { this.#complain(`“${this.#field.value}” is no number. 1 to ${count(MOST)} is allowed, or auto.`); return; }
    await this.#send(value, this.#version, (version) => {
      // Undo takes back this change only: not one that somebody made after it.
      const undo = () => this.#send(before, version, () => toast(`Slots back to ${before}.`));
      toast(`Slots ${before} → ${value}.`, { text: 'It holds from now on.', undo });
    });
  }

  async #send(value, version, done) {
    this.#busy = true;
    this.#complain('');
    this.update();
    try {
      const state = await tune({ slots: value }, version);
      for (const name of ['slots', 'settings', 'settings_version']) if (name in state) this.#model.state[name] = state[name];
      this.#edited = false;
      done(state.settings_version);
    } catch (error) {
      // Somebody was first: the form shows what they chose.
      if (error.status === 409) this.#edited = false;
      this.#complain(error.message);
    } finally {
      this.#busy = false;
      this.update();
    }
  }
}
