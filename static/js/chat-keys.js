// Keys that work all over the page, and the dialog that lists them.
const dialog = document.getElementById('keys');
const singles = document.getElementById('single-keys');

// Single keys hinder those who speak to their browser: they can be switched off.
const kept = {
  get() { try { return localStorage.getItem('single-keys') !== 'off'; } catch { return true; } },
  set(on) { try { localStorage.setItem('single-keys', on ? 'on' : 'off'); } catch { /* storage may be forbidden */ } },
};

// acts: search, fresh (a new chat), escape, which says whether there was anything to do.
export function bindKeys(acts) {
  singles.checked = kept.get();
  singles.addEventListener('change', () => kept.set(singles.checked));
  addEventListener('keydown', (event) => {
    if (event.defaultPrevented || event.isComposing || dialog.open) return;
    const act = wanted(event, acts);
    if (act && act() !== false) event.preventDefault();
  });
}

function wanted(event, acts) {
  const withControl = event.ctrlKey || event.metaKey;
  if (event.key === 'Escape') return acts.escape;
  if (withControl && event.shiftKey && event.key.toLowerCase() === 'o') return acts.fresh;
  if (withControl || event.altKey || !kept.get()) return null;
  if (event.target.closest?.('input, textarea, select, [contenteditable]')) return null;
  return { '/': acts.search, '?': () => dialog.showModal() }[event.key] ?? null;
}
