// Follows what is under way: a change of the model, a download, an import. When one of them has
// ended the page is asked for again and says how it went.
import { setText } from './words.js';

const EVERY_MS = 1000;
const card = document.querySelector('[data-progress]');
const rows = [...card.querySelectorAll('[data-item]')];

function show(row, item) {
  setText(row.querySelector('[data-what]'), item.what);
  setText(row.querySelector('[data-doing]'), item.doing);
  setText(row.querySelector('[data-note]'), item.note);
  const bar = row.querySelector('[data-share]');
  if (item.share === null) bar.removeAttribute('value');
  else bar.value = item.share;
}

async function look() {
  let found = null;
  try {
    const response = await fetch(card.dataset.progress, { credentials: 'same-origin' });
    if (response.redirected || response.status === 403) { location.reload(); return; }
    if (response.ok) found = (await response.json()).under_way;
  } catch { /* the server is away for a moment: asked again */ }
  if (found) {
    if (found.length !== rows.length) { location.assign(location.pathname); return; }
    found.forEach((item, index) => show(rows[index], item));
  }
  setTimeout(look, EVERY_MS);
}

setTimeout(look, EVERY_MS);
