// What a page must hold for people who do not see it well, or have no mouse. Evaluated in a browser.
() => {
  const faults = [];
  const seen = (element) => element.checkVisibility({ visibilityProperty: true });
  const brief = (element) => element.outerHTML.slice(0, 120);
  const named = (element, attribute) => (element.getAttribute(attribute) ?? '').split(/\s+/).filter(Boolean);
  const spoken = (element) => [...element.childNodes].map((node) => {
    if (node.nodeType === Node.TEXT_NODE) return node.data;
    if (node.nodeType !== Node.ELEMENT_NODE || node.getAttribute('aria-hidden') === 'true') return '';
    return node.getAttribute('aria-label') ?? spoken(node);
  }).join('').trim();
  const nameOf = (element) => element.getAttribute('aria-label')
    || named(element, 'aria-labelledby').map((id) => document.getElementById(id)?.textContent ?? '').join(' ').trim()
    || [...(element.labels ?? [])].map(spoken).join(' ').trim() || spoken(element);

  // ---- names, ids, headings

  const ids = [...document.querySelectorAll('[id]')].map((element) => element.id);
  for (const id of new Set(ids.filter((id, i) => ids.indexOf(id) !== i))) faults.push(`the id ${id} is there twice`);
  for (const attribute of ['aria-labelledby', 'aria-describedby', 'aria-controls', 'for']) {
    for (const element of document.querySelectorAll(`[${attribute}]`)) {
      const gone = named(element, attribute).filter((id) => !document.getElementById(id));
      if (gone.length) faults.push(`${attribute} names ${gone}, which is not there: ${brief(element)}`);
    }
  }
  const told = 'a[href], button, input:not([type=hidden]), select, textarea, dialog, progress, meter:not([aria-hidden]), [role=img], [role=application], [role=group], [role=radiogroup], [tabindex="0"]';
  for (const element of document.querySelectorAll(told)) {
    if (seen(element) && !nameOf(element)) faults.push(`it has no name: ${brief(element)}`);
  }
  for (const head of document.querySelectorAll('th')) if (!spoken(head)) faults.push(`an empty table head: ${brief(head.closest('table'))}`);
  let level = 0;
  for (const heading of document.querySelectorAll('h1, h2, h3, h4')) {
    if (!seen(heading) || heading.closest('dialog')) continue;
    const own = Number(heading.tagName[1]);
    if (own > level + 1) faults.push(`h${own} after h${level}: ${heading.textContent.trim()}`);
    level = own;
  }
  for (const once of ['h1', 'main', 'html[lang]']) {
    const number = document.querySelectorAll(once).length;
    if (number !== 1) faults.push(`${number} times ${once}`);
  }

  // ---- contrast of what is written, on what lies behind it

  const pixel = Object.assign(document.createElement('canvas'), { width: 1, height: 1 }).getContext('2d', { willReadFrequently: true });
  const colour = (css) => {
    pixel.clearRect(0, 0, 1, 1);
    pixel.fillStyle = css;
    pixel.fillRect(0, 0, 1, 1);
    return [...pixel.getImageData(0, 0, 1, 1).data];
  };
  const over = (front, back) => [0, 1, 2].map((i) => (front[i] * front[3] + back[i] * (255 - front[3])) / 255).concat(255);
  const behind = (element) => {
    const planes = [];
    for (let at = element; at && planes.at(-1)?.[3] !== 255; at = at.parentElement) planes.push(colour(getComputedStyle(at).backgroundColor));
    return planes.reduceRight((back, front) => over(front, back), [255, 255, 255, 255]);
  };
  const luminance = (rgb) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
    const part = rgb[i] / 255;
    return sum + weight * (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  }, 0);
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), faint = new Set();
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !seen(element) || element.closest('[aria-hidden=true], :disabled, .visually-hidden, svg')) continue;
    const back = behind(element), front = over(colour(getComputedStyle(element).color), back);
    const [low, high] = [luminance(front), luminance(back)].sort((a, b) => a - b), ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) faint.add(`contrast ${ratio.toFixed(2)}: ${brief(element)}`);
  }
  return [...faults, ...faint];
}
