// Small behaviours every page shares, bound by data-* attributes.
const root = document.documentElement;
const isDark = () => (root.dataset.theme
  ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches);

for (const button of document.querySelectorAll('[data-theme-toggle]')) {
  button.addEventListener('click', () => {
    root.dataset.theme = isDark() ? 'light' : 'dark';
    try { localStorage.setItem('theme', root.dataset.theme); } catch { /* storage may be forbidden */ }
    dispatchEvent(new Event('themechange'));
  });
}
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
  if (!root.dataset.theme) dispatchEvent(new Event('themechange'));
});

// On a narrow screen the pages' names scroll sideways: the current one is brought into sight.
const here = document.querySelector('.topbar nav [aria-current]'), names = here?.parentElement;
if (names && names.scrollWidth > names.clientWidth) names.scrollLeft = here.offsetLeft - names.offsetLeft - 40;

// data-copy="id" copies that element's text and says so in the button's [data-label].
for (const button of document.querySelectorAll('[data-copy]')) {
  button.addEventListener('click', async () => {
    const source = document.getElementById(button.dataset.copy);
    const label = button.querySelector('[data-label]');
    let said = 'Copied';
    try { await navigator.clipboard.writeText(source.textContent.trim()); } catch {
      getSelection().selectAllChildren(source);
      said = 'Press Ctrl+C';
    }
    if (label) { label.textContent = said; setTimeout(() => { label.textContent = 'Copy'; }, 1600); }
  });
}

// data-dialog="id" opens that dialog; data-close inside it closes it.
for (const button of document.querySelectorAll('[data-dialog]')) {
  button.addEventListener('click', () => document.getElementById(button.dataset.dialog).showModal());
}
for (const button of document.querySelectorAll('dialog [data-close]')) {
  button.addEventListener('click', () => button.closest('dialog').close());
}

// data-show-password toggles the field before it.
for (const button of document.querySelectorAll('[data-show-password]')) {
  button.addEventListener('click', () => {
    const field = button.parentElement.querySelector('input');
    const shown = field.type === 'text';
    field.type = shown ? 'password' : 'text';
    button.setAttribute('aria-pressed', String(!shown));
    button.querySelector('[data-label]').textContent = shown ? 'Show' : 'Hide';
  });
}
