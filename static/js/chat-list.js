// The sidebar: list, search, the menu of a chat (rename, pin, delete with undo), sliding on phones.
import { say, toast } from './chat-notice.js';

const REFRESH_MS = 150;
const csrf = document.body.dataset.csrf;

export async function post(path, fields = {}) {
  const response = await fetch(path, {
    method: 'POST', headers: { 'X-CSRFToken': csrf }, body: new URLSearchParams(fields), redirect: 'manual',
  });
  if (response.type === 'opaqueredirect') throw new Error('You are signed out. Sign in again.');
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(answer.message ?? 'The server did not take it. Load the page again.');
  return answer;
}

export class ChatList extends EventTarget {
  #nav = document.getElementById('conversations');
  #search = document.getElementById('search');
  #sidebar = document.getElementById('sidebar');
  #opener = document.getElementById('sidebar-open');
  #menu = document.getElementById('menu');
  #menuFor = null; // {id, button}
  #narrow = matchMedia('(max-width: 760px)');
  #timer = 0;
  #asked = 0;
  #limit = '';
  #isStale = false;
  currentId;
  // Being deleted by this tab, which says so itself.
  deletingId = null;

  // Events: "renamed" {id, title}, "pinned" {id, pinned}, "deleted" {id}, "restored" {id}, "trouble" {message}.
  constructor(currentId) {
    super();
    this.currentId = currentId;
    this.#search.addEventListener('input', () => this.refresh());
    this.#nav.addEventListener('click', (event) => this.#onClick(event));
    document.getElementById('more').addEventListener('click', (event) => this.#toggleMenu(event.currentTarget));
    this.#menu.addEventListener('click', (event) => this.#onMenu(event));
    this.#menu.addEventListener('keydown', (event) => this.#onMenuKey(event));
    this.#menu.addEventListener('focusout', (event) => {
      if (event.relatedTarget && !this.#menu.contains(event.relatedTarget)) this.closeMenu(false);
    });
    document.addEventListener('pointerdown', (event) => {
      if (!event.target.closest('#menu, [data-menu-for]')) this.closeMenu(false);
    });
    this.#nav.addEventListener('scroll', () => this.closeMenu(false), { passive: true });
    this.#opener.addEventListener('click', () => this.slide(true));
    document.querySelector('[data-sidebar-close]').addEventListener('click', () => this.slide(false));
    this.#narrow.addEventListener('change', () => this.slide(false, false));
    this.slide(false, false);
    this.#nav.querySelector('[aria-current]')?.scrollIntoView({ block: 'nearest' });
  }

  // ---- list

  refresh() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#load(), REFRESH_MS);
  }

  async #load() {
    const turn = (this.#asked += 1);
    const query = new URLSearchParams({ q: this.#search.value.trim(), current: this.currentId ?? '' });
    if (this.#limit) query.set('limit', this.#limit);
    let html;
    try {
      const response = await fetch(`${this.#nav.dataset.listUrl}?${query}`, { redirect: 'manual' });
      if (!response.ok) return;
      html = await response.text();
    } catch { return; /* offline: the list stays as it is */ }
    if (turn !== this.#asked) return;
    // Nothing moves under a menu that is open or a name that is being written.
    if (this.menuIsOpen || this.#nav.querySelector('.rename')) { this.#isStale = true; return; }
    this.#isStale = false;
    const focused = document.activeElement?.closest?.('.row')?.dataset.id;
    const onButton = document.activeElement?.matches?.('button');
    // Our own server's markup, escaped there; scripts in it would not run.
    const fresh = new DOMParser().parseFromString(html, 'text/html');
    this.#nav.replaceChildren(...fresh.body.childNodes);
    if (focused) this.#row(focused)?.querySelector(onButton ? 'button' : 'a')?.focus();
    if (this.#search.value.trim()) {
      const found = this.#nav.querySelectorAll('.row').length;
      say(found ? `${found} chat${found === 1 ? '' : 's'} found.` : 'Nothing found.');
    }
  }

  #row(id) { return this.#nav.querySelector(`.row[data-id="${CSS.escape(id)}"]`); }

  #onClick(event) {
    const menuButton = event.target.closest('[data-menu-for]');
    if (menuButton) this.#toggleMenu(menuButton);
    // A place in the chat that is open needs no new page.
    if (event.target.closest('a')) this.slide(false, false);
    if (event.target.closest('[data-clear-search]')) { this.#search.value = ''; this.#search.focus(); this.refresh(); }
    const more = event.target.closest('[data-limit]');
    if (more) { this.#limit = more.dataset.limit; this.refresh(); }
  }

  focusSearch() { this.slide(true); this.#search.focus(); this.#search.select(); }

  // ---- menu

  get menuIsOpen() { return !this.#menu.hidden; }

  #toggleMenu(button) {
    const same = this.#menuFor?.button === button;
    this.closeMenu(false);
    if (same) return;
    const id = button.dataset.menuFor;
    this.#menuFor = { id, button };
    button.setAttribute('aria-expanded', 'true');
    const pinned = this.#isPinned(id);
    this.#menu.querySelector('[data-label]').textContent = pinned ? 'Unpin' : 'Pin';
    this.#menu.querySelector('[data-act="export"]').href = `/c/${id}/export/`;
    this.#menu.hidden = false;
    const box = button.getBoundingClientRect();
    const size = this.#menu.getBoundingClientRect();
    const left = Math.min(box.left, innerWidth - size.width - 8);
    const below = box.bottom + 4 + size.height < innerHeight;
    this.#menu.style.left = `${Math.max(8, left)}px`;
    this.#menu.style.top = `${below ? box.bottom + 4 : Math.max(8, box.top - size.height - 4)}px`;
    this.#menu.querySelector('button').focus();
  }

  closeMenu(refocus = true) {
    if (this.#menu.hidden) return;
    this.#menu.hidden = true;
    this.#menuFor?.button.setAttribute('aria-expanded', 'false');
    if (refocus) this.#menuFor?.button.focus();
    this.#menuFor = null;
    if (this.#isStale) this.refresh();
  }

  #onMenuKey(event) {
    const items = [...this.#menu.querySelectorAll('[role="menuitem"]')];
    const at = items.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
    if (event.key === 'Tab') this.closeMenu();
    if (to === undefined) return;
    event.preventDefault();
    items[(to + items.length) % items.length].focus();
  }

  #onMenu(event) {
    const act = event.target.closest('[data-act]')?.dataset.act;
    if (!act) return;
    const { id, button } = this.#menuFor;
    this.closeMenu();
    if (act === 'rename') this.#rename(id, button);
    if (act === 'pin') this.pin(id, !this.#isPinned(id));
    if (act === 'delete') this.delete(id);
  }

  // ---- acts

  #tell(name, detail) { this.dispatchEvent(new CustomEvent(name, { detail })); }

  async #act(work) {
    try { return await work(); } catch (error) { this.#tell('trouble', { message: error.message }); return null; }
  }

  #isPinned(id) {
    const row = this.#row(id);
    if (row) return row.dataset.pinned === 'true';
    return document.getElementById('pin').getAttribute('aria-pressed') === 'true';
  }

  pin(id, pinned) {
    return this.#act(async () => {
      await post(`/c/${id}/pin/`, { pinned });
      this.#tell('pinned', { id, pinned });
      this.refresh();
    });
  }

  delete(id) {
    return this.#act(async () => {
      this.deletingId = id;
      await post(`/c/${id}/delete/`);
      this.#tell('deleted', { id });
      this.refresh();
      toast('Chat deleted.', () => this.#act(async () => {
        await post(`/c/${id}/restore/`);
        this.#tell('restored', { id });
        this.refresh();
      }));
    });
  }

  // The name becomes a field, in the list or in the head, where the menu was opened.
  #rename(id, button) {
    const row = button.closest('.row');
    const shown = row ? row.querySelector('[data-title]') : document.getElementById('title');
    const place = row ? row.querySelector('.conversation-link') : shown;
    const field = document.createElement('input');
    field.className = 'input small rename';
    field.maxLength = 120;
    field.setAttribute('aria-label', 'Name of the chat');
    field.value = shown.textContent;
    place.hidden = true;
    place.after(field);
    field.focus();
    field.select();
    let done = false;
    const end = (keep) => {
      if (done) return;
      done = true;
      const title = field.value.trim();
      place.hidden = false;
      field.remove();
      button.focus();
      if (keep && title && title !== shown.textContent) this.#saveName(id, title, shown);
      else this.refresh();
    };
    field.addEventListener('blur', () => end(true));
    field.addEventListener('keydown', (event) => {
      if (event.isComposing) return;
      if (event.key === 'Enter') { event.preventDefault(); end(true); }
      if (event.key === 'Escape') { event.stopPropagation(); end(false); }
    });
  }

  #saveName(id, title, shown) {
    const before = shown.textContent;
    shown.textContent = title;
    return this.#act(async () => {
      try { await post(`/c/${id}/rename/`, { title }); } catch (error) { shown.textContent = before; throw error; }
      this.#tell('renamed', { id, title });
      this.refresh();
      toast('Renamed.', () => this.#takeBackName(id, before));
    });
  }

  #takeBackName(id, title) {
    return this.#act(async () => {
      await post(`/c/${id}/rename/`, { title });
      this.#tell('renamed', { id, title });
      this.refresh();
    });
  }

  // ---- phones

  get isOpenOnPhone() { return this.#narrow.matches && document.body.classList.contains('sidebar-open'); }

  slide(open, refocus = true) {
    const narrow = this.#narrow.matches;
    document.body.classList.toggle('sidebar-open', narrow && open);
    this.#sidebar.inert = narrow && !open;
    document.querySelector('.chat-main').inert = narrow && open;
    this.#opener.setAttribute('aria-expanded', String(narrow && open));
    if (!narrow || !refocus) return;
    if (open) this.#sidebar.querySelector('a, button').focus(); else this.#opener.focus();
  }
}
