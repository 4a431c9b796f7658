// What the page tells: notices in place, one banner, toasts, and words for screen readers.
const clone = (id) => document.getElementById(id).content.firstElementChild.cloneNode(true);
const TOAST_MS = 6000;

// kind: danger, warn, info or neutral. actions: [{label, act, primary}]
export function notice({ kind, icon, head, text = '', actions = [], role }) {
  const node = clone('tpl-notice');
  node.classList.add(kind);
  if (role) node.setAttribute('role', role);
  for (const mark of node.querySelectorAll('[data-icon]')) {
    if (mark.dataset.icon === icon) mark.replaceWith(mark.firstElementChild);
    else mark.remove();
  }
  node.querySelector('[data-head]').textContent = head;
  const body = node.querySelector('[data-text]');
  if (text) body.textContent = text; else body.remove();
  const row = node.querySelector('[data-actions]');
  for (const { label, act, href, primary } of actions) {
    const button = document.createElement(href ? 'a' : 'button');
    button.className = `button small${primary ? '' : ' quiet'}`;
    button.textContent = label;
    if (href) button.href = href; else { button.type = 'button'; button.addEventListener('click', act); }
    row.append(button);
  }
  if (!actions.length) row.remove();
  return node;
}

// One at a time, the worst wins.
const WORTH = ['model', 'signed-out'];
const banners = new Map();
export function banner(name, options) {
  if (options) banners.set(name, options); else banners.delete(name);
  const place = document.getElementById('banner');
  const worst = [...banners.keys()].sort((a, b) => WORTH.indexOf(b) - WORTH.indexOf(a))[0];
  if (place.dataset.shows === worst) return;
  place.dataset.shows = worst ?? '';
  place.replaceChildren();
  if (!worst) return;
  const node = notice({ role: 'alert', ...banners.get(worst) });
  node.classList.add('banner');
  place.append(node);
}

export function toast(head, undo) {
  const node = clone('tpl-toast');
  node.querySelector('[data-head]').textContent = head;
  let timer = 0;
  const leave = () => node.remove();
  const wait = () => { clearTimeout(timer); timer = setTimeout(leave, TOAST_MS); };
  for (const event of ['pointerenter', 'focusin']) node.addEventListener(event, () => clearTimeout(timer));
  for (const event of ['pointerleave', 'focusout']) node.addEventListener(event, wait);
  if (undo) {
    const button = node.querySelector('[data-act="undo"]');
    button.hidden = false;
    button.addEventListener('click', () => { leave(); undo(); });
  }
  const stack = document.getElementById('toasts');
  while (stack.children.length >= 3) stack.firstElementChild.remove();
  stack.append(node);
  wait();
}

// Polite; the queue's place at most every 5 s.
let saidQueueAt = 0;
export function say(text, isQueue = false) {
  const now = Date.now();
  if (isQueue && now - saidQueueAt < 5000) return;
  if (isQueue) saidQueueAt = now;
  const status = document.getElementById('status');
  if (status.textContent !== text) status.textContent = text;
}

export function waiting() {
  const node = clone('tpl-waiting');
  const part = (name) => node.querySelector(`[data-${name}]`);
  return {
    node,
    // mark: queue, next or spinner
    show({ mark, head, text = '', cancel }) {
      for (const name of ['queue', 'next', 'spinner']) part(name).toggleAttribute('hidden', name !== mark);
      part('head').textContent = head;
      part('text').textContent = text;
      part('text').hidden = !text;
      node.querySelector('[data-act="cancel"]').hidden = !cancel;
    },
  };
}

export async function copyText(text, fallback) {
  try { await navigator.clipboard.writeText(text); return true; } catch {
    getSelection().selectAllChildren(fallback);
    return false;
  }
}
