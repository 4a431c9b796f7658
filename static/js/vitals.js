// The header numbers, the banner over the page, and the list of events.
import { bytes, clock, count, icon, make, many, rate, seconds, setText, svg } from './words.js';

// More slots than this are one bar: pips would be too small to count.
const MOST_PIPS = 24;

export class Vitals {
  #model; #parts = new Map(); #pipsKey = ''; #health = '';

  constructor(model) {
    this.#model = model;
    for (const element of document.querySelectorAll('[data-vital]')) this.#parts.set(element.dataset.vital, element);
  }

  update() {
    const { state } = this.#model, { slots, kv } = state;
    this.#running(state, slots);
    this.#say('waiting', count(state.waiting ?? 0));
    this.#say('waiting-unit', state.waiting === 1 ? 'request' : 'requests');
    this.#say('waiting-why', this.#waitingWhy(state));
    this.#speed(state);
    const share = kv?.blocks_total ? kv.blocks_used / kv.blocks_total * 100 : null;
    this.#say('kv', share === null ? '–' : share > 0 && share < 10 ? share.toFixed(1) : String(Math.round(share)));
    document.querySelector('[data-kv-meter]').value = share ?? 0;
    this.#say('kv-why', kv?.blocks_total ? `${count(kv.blocks_used)} of ${many(kv.blocks_total, 'block')}` : '');
    const hits = state.cache_hit_rate;
    this.#parts.get('hits').nextElementSibling.hidden = hits === null || hits === undefined;
    this.#say('hits', hits === null || hits === undefined ? '–' : String(Math.round(hits * 100)));
    this.#say('hits-why', hits === null || hits === undefined ? 'no prompts in the last 15 min' : 'of prompt tokens in the last 15 min were not computed again');
    this.#healthOf(state);
    if (kv?.block_size) setText(document.querySelector('[data-map-scale]'), `one cell = ${kv.block_size} tokens = ${bytes(kv.bytes_per_block)} · half cell = being written`);
  }

  #say(name, text) { setText(this.#parts.get(name), text); }

  #running(state, slots) {
    this.#say('running', count(state.running ?? 0));
    this.#say('slots', slots?.effective ? `of ${many(slots.effective, 'slot')}` : '');
    const kept = state.settings?.reserved_interactive_slots?.effective ?? 0;
    this.#say('running-why', kept ? `${many(kept, 'slot')} kept for chat` : slots && slots.requested !== slots.effective && slots.requested !== 'auto' ? `${slots.requested} asked for` : '');
    const total = slots?.effective ?? 0, on = Math.min(total, state.running ?? 0), key = `${total} ${on} ${kept}`;
    if (key === this.#pipsKey) return;
    this.#pipsKey = key;
    const pips = document.querySelector('[data-pips]');
    if ((slots?.effective ?? 0) > MOST_PIPS) { pips.replaceChildren(...this.#bar(slots.effective, state.running ?? 0, kept)); return; }
    const pitch = Math.min(11.6, 138 / Math.max(1, total)), width = Math.max(1.5, pitch - 3.6 * Math.min(1, pitch / 11.6));
    pips.replaceChildren(...Array.from({ length: total }, (_, i) => svg('rect', { class: i < on ? 'on' : i >= total - kept ? 'kept' : 'off', x: (i * pitch + 0.5).toFixed(1), y: '.5', width: width.toFixed(1), height: '7', rx: Math.min(1.5, width / 3) })));
  }

  #bar(total, on, kept) {
    const at = (slots) => (slots / total * 138).toFixed(1), part = (name, from, to) => svg('rect', { class: name, x: at(from), y: '1', width: at(to - from), height: '6', rx: '1.5' });
    return [part('track', 0, total), part('kept', total - kept, total), part('on', 0, on)];
  }

  #waitingWhy(state) {
    const waiting = this.#model.waiting();
    if (!state.waiting) return 'Nobody waits';
    const kept = state.settings?.reserved_interactive_slots?.effective ?? 0, limit = state.slots?.effective ?? 0;
    let why = 'for KV memory, not for a slot.';
    if (state.state !== 'ready') why = 'until the server takes new requests.';
    else if (state.running >= limit) why = 'for a free slot.';
    else if (state.running >= limit - kept && waiting.every((row) => row.class !== 'interactive')) why = `for a slot: ${count(kept)} are kept for chat.`;
    const oldest = Math.min(...waiting.map((row) => row.since));
    return Number.isFinite(oldest) ? `${why} Longest wait ${seconds(this.#model.now - oldest)}` : why;
  }

  #speed(state) {
    const total = state.decode_tokens_per_s ?? state.tokens_per_s ?? 0, writing = this.#model.running().filter((row) => row.state === 'decode').length;
    this.#say('speed', rate(total));
    const reading = state.prefill_tokens_per_s ? `${count(state.prefill_tokens_per_s)} tok/s read` : '';
    this.#say('speed-why', [writing && total ? `${rate(total / writing)} tok/s for each answer` : '', reading].filter(Boolean).join(', ') || 'nothing is written now');
  }

  #healthOf(state) {
    const [image, words, tone] = { ready: ['check', 'Healthy', 'ok-text'], loading: ['clock', 'Loading', 'warn-text'], rebuilding: ['clock', 'Loading again', 'warn-text'], swapping: ['clock', 'Changing model', 'warn-text'], hung: ['error', 'Not answering', 'danger-text'], draining: ['out', 'Draining', 'warn-text'], dead: ['error', 'Stopped', 'danger-text'] }[state.state] ?? ['plug', 'No model', 'danger-text'];
    if (this.#health !== words) {
      this.#health = words;
      const place = document.querySelector('[data-health]');
      place.className = `value state ${tone}`;
      place.querySelector('[data-health-icon]').replaceChildren(icon(image));
    }
    this.#say('health', words);
    const { model, totals } = state, parts = [];
    const failed = totals?.requests_failed;
    if (failed !== undefined) parts.push(failed ? `${many(failed, 'request')} failed since the start.` : 'No failed requests since the start.');
    if (model) parts.push(`${model.name} on ${model.device}, ${model.dtype}.`);
    if (model?.notice) parts.push(model.notice);
    this.#say('health-why', parts.join(' '));
  }
}

export class EventList {
  #model; #list = document.querySelector('#events'); #empty = document.querySelector('#events-empty'); #newest = 0;

  constructor(model) { this.#model = model; }

  update() {
    const { events, now, epoch } = this.#model;
    if ((events[0]?.number ?? 0) !== this.#newest || this.#list.children.length !== Math.min(events.length, 60)) {
      this.#newest = events[0]?.number ?? 0;
      this.#list.replaceChildren(...events.map((event) => {
        const item = make('li', event.tone ? { class: event.tone } : {}, icon(event.icon), make('span', {}, event.text), make('time', { datetime: new Date(event.at * 1000).toISOString() }));
        item.dataset.at = event.at;
        return item;
      }));
      this.#empty.hidden = events.length > 0;
      this.#list.hidden = events.length === 0;
    }
    for (const item of this.#list.children) {
      const at = Number(item.dataset.at), age = epoch + now - at;
      setText(item.lastChild, age < 100 ? `${clock(at)} · ${Math.max(0, Math.round(age))} s ago` : clock(at));
    }
  }
}
