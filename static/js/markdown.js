// Markdown from the model to nodes. The only caller of the two vendored libraries.
//
// Raw HTML is shown as the text it is, images become links that load nothing, links go to http,
// https and mailto only. DOMPurify's allow list is the second wall, the page's CSP the third.
import DOMPurify from '../vendor/dompurify-3.5.0.esm.js';
import { Marked } from '../vendor/marked-18.2.1.esm.js';
import { highlight } from './chat-highlight.js';

const ESCAPES = { '&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;', "'": '&#39;' };
const escape = (text) => text.replace(/[&<>"']/g, (c) => ESCAPES[c]);

// The address as the browser would read it, if it is of a kind that may be followed.
function safeAddress(href) {
  try {
    const url = new URL(href);
    return ['http:', 'https:', 'mailto:'].includes(url.protocol) ? url.href : null;
  } catch { return null; }
}

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html({ text, block }) {
      if (/^<br\s*\/?>$/i.test(text.trim())) return '<br>';
      const shown = escape(text.trimEnd()).replaceAll('\n', '<br>');
      return block ? `<p>${shown}</p>` : shown;
    },
    image({ href, text }) {
      const address = safeAddress(href);
      const label = `Image${text ? `: ${text}` : ''}`;
      if (!address) return escape(`${label} (${href})`);
      return `<a href="${escape(address)}">${escape(`${label} (${address})`)}</a>`;
    },
    link({ href, tokens }) {
      const label = this.parser.parseInline(tokens);
      const address = safeAddress(href);
      return address ? `<a href="${escape(address)}">${label}</a>` : `${label} (${escape(href)})`;
    },
    code({ text, lang }) {
      const name = (lang ?? '').trim().split(/\s/)[0].slice(0, 30);
      return `<pre data-lang="${escape(name)}"><code>${escape(text)}</code></pre>`;
    },
    heading({ tokens, depth }) {
      const level = Math.min(depth + 2, 6);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
    checkbox({ checked }) { return checked ? '☑ ' : '☐ '; },
  },
});

const POLICY = {
  ALLOWED_TAGS: ['a', 'blockquote', 'br', 'code', 'del', 'em', 'h3', 'h4', 'h5', 'h6', 'hr', 'li', 'ol',
    'p', 'pre', 'strong', 'table', 'tbody', 'td', 'th', 'thead', 'tr', 'ul'],
  ALLOWED_ATTR: ['href', 'align', 'start', 'data-lang'],
  ADD_URI_SAFE_ATTR: ['align', 'start', 'data-lang'],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const codeTemplate = document.getElementById('tpl-code');

function dressCode(pre) {
  const block = codeTemplate.content.firstElementChild.cloneNode(true);
  const lang = pre.dataset.lang ?? '';
  block.querySelector('[data-lang]').textContent = lang || 'code';
  highlight(block.querySelector('code'), pre.textContent, lang);
  pre.replaceWith(block);
}

function dressTable(table) {
  const wrap = document.createElement('div');
  wrap.className = 'table-wrap';
  wrap.tabIndex = 0;
  table.replaceWith(wrap);
  table.className = 'table';
  for (const cell of table.querySelectorAll('[align]')) {
    if (cell.getAttribute('align') === 'right') cell.className = 'r';
    cell.removeAttribute('align');
  }
  wrap.append(table);
}

// The whole text as a fragment of clean nodes.
export function render(text) {
  const fragment = DOMPurify.sanitize(marked.parse(text), POLICY);
  for (const link of fragment.querySelectorAll('a')) {
    if (!link.hasAttribute('href')) continue;
    link.rel = 'noopener noreferrer';
    link.referrerPolicy = 'no-referrer';
    link.target = '_blank';
  }
  fragment.querySelectorAll('pre').forEach(dressCode);
  fragment.querySelectorAll('table').forEach(dressTable);
  return fragment;
}

// Make `target` show `text`, touching only the blocks that changed: a selection in text that is
// already complete survives while the answer grows.
export function renderInto(target, text) {
  const fresh = [...render(text).childNodes].filter((n) => n.nodeType === Node.ELEMENT_NODE || n.data.trim());
  let same = 0;
  const shown = target.childNodes;
  while (same < shown.length && same < fresh.length && shown[same].isEqualNode(fresh[same])) same += 1;
  while (shown.length > same) target.lastChild.remove();
  target.append(...fresh.slice(same));
}
