// What the person just did: six seconds, stays while hovered or focused, Undo where possible.
import { icon, make } from './words.js';

const SHOWN_MS = 6000;

export function toast(title, { text = '', undo = null } = {}) {
  const box = make('div', { class: 'toast', role: 'status' }, make('span', { class: 'ok-text' }, icon('check')));
  const body = make('div', {}, make('strong', {}, title));
  if (text) body.append(make('p', {}, text));
  box.append(body);
  if (undo) {
    const button = make('button', { class: 'button small quiet', type: 'button' }, icon('undo'), ' Undo');
    button.addEventListener('click', () => { box.remove(); undo(); });
    box.append(button);
  }
  document.querySelector('#toasts').append(box);
  const leave = () => {
    if (box.matches(':hover, :focus-within')) setTimeout(leave, 1000);
    else box.remove();
  };
  setTimeout(leave, SHOWN_MS);
}
