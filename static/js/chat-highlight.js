// Colours for code: strings, comments, numbers and the commonest keywords. Builds text nodes only.
const WORDS = {
  python: 'and as assert async await break class continue def del elif else except finally for from global if import in is lambda match None nonlocal not or pass raise return True False try while with yield',
  js: 'async await break case catch class const continue default delete do else export extends false finally for from function if import in instanceof interface let new null of return static super switch this throw true try type typeof undefined var void while yield',
  c: 'auto bool break case catch char class const constexpr continue default delete do double else enum export extends extern false final finally float fn for func go if impl implements import in int interface let long loop match mod mut namespace new nil null nullptr package private protected pub public return self short signed sizeof static string struct super switch template this throw trait true try type typedef union unsigned use using var virtual void where while',
  sql: 'add all alter and as asc between by case create cross delete desc distinct drop else end exists from full group having in index inner insert into is join key left like limit not null on or order outer primary references right select set table then union unique update values view when where with',
  shell: 'case do done elif else esac export fi for function if in local read return set then until while',
};
const FAMILY = {
  py: 'python', python: 'python', python3: 'python', pycon: 'python',
  js: 'js', javascript: 'js', jsx: 'js', ts: 'js', typescript: 'js', tsx: 'js', json: 'js', mjs: 'js',
  c: 'c', cpp: 'c', 'c++': 'c', cs: 'c', csharp: 'c', go: 'c', java: 'c', kotlin: 'c', rust: 'c', rs: 'c', swift: 'c', php: 'c', scala: 'c',
  sql: 'sql', bash: 'shell', sh: 'shell', shell: 'shell', zsh: 'shell', yaml: 'shell', yml: 'shell', toml: 'shell', dockerfile: 'shell', ruby: 'python', rb: 'python',
};
const STRING = String.raw`"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?`;
const COMMENT = {
  python: String.raw`#[^\n]*`, shell: String.raw`(?<![\w$])#[^\n]*`, sql: String.raw`--[^\n]*|/\*[\s\S]*?(?:\*/|$)`,
  js: String.raw`//[^\n]*|/\*[\s\S]*?(?:\*/|$)`, c: String.raw`//[^\n]*|/\*[\s\S]*?(?:\*/|$)`,
};
// A longer text than this is shown plain: colouring it each frame would cost more than it tells.
const MOST_CHARS = 30000;

const rules = new Map();
function ruleFor(family) {
  if (!rules.has(family)) {
    const quick = family === 'js' ? String.raw`|\`(?:\\.|[^\`\\])*\`?` : '';
    const words = WORDS[family].split(' ').join('|');
    rules.set(family, new RegExp(
      `(?<c>${COMMENT[family]})|(?<s>${STRING}${quick})|(?<n>\\b\\d[\\w.]*)|(?<k>\\b(?:${words})\\b)`,
      family === 'sql' ? 'gi' : 'g'));
  }
  return rules.get(family);
}

export function highlight(target, code, lang) {
  const family = FAMILY[lang.toLowerCase()];
  if (!family || code.length > MOST_CHARS) { target.textContent = code; return; }
  let last = 0;
  for (const match of code.matchAll(ruleFor(family))) {
    if (!match[0]) continue;
    if (match.index > last) target.append(code.slice(last, match.index));
    const span = document.createElement('span');
    span.className = Object.keys(match.groups).find((name) => match.groups[name] !== undefined);
    span.textContent = match[0];
    target.append(span);
    last = match.index + match[0].length;
  }
  target.append(code.slice(last));
}
