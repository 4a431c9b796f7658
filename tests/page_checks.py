"""What every page owes people who do not see it well, or have no mouse. Imports no Django."""

from pathlib import Path

from playwright.sync_api import Page

CHECKS = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
# More controls than any page has: a page that never lets the focus out would go on for ever.
MOST_CONTROLS = 400

# Tab goes on from where the focus was last, also when nothing has it.
TO_THE_TOP = """() => {
  document.body.tabIndex = -1;
  document.body.focus();
  document.body.removeAttribute('tabindex');
}"""
# The focused element: marked as reached, and whether one sees that it has the focus.
REACHED = """() => {
  const at = document.activeElement;
  if (!at || at === document.body || at.dataset.reached) return null;
  at.dataset.reached = 'yes';
  const ringed = at.matches('.segmented input') ? at.nextElementSibling : at;
  const frame = at.closest('.composer') ?? ringed;
  const style = getComputedStyle(ringed), box = at.getBoundingClientRect();
  const hasRing = (style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2)
    || getComputedStyle(frame).boxShadow !== 'none'
    || getComputedStyle(frame).outlineStyle !== 'none';
  const isSeen = box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
  return hasRing && isSeen ? '' : at.outerHTML.slice(0, 120);
}"""
# Of radios with one name the arrow keys reach the others.
MISSED = """() => [...document.querySelectorAll(
  'a[href], button, input:not([type=hidden]), select, textarea, [tabindex="0"]')]
  .filter((one) => one.checkVisibility({ visibilityProperty: true }) && !one.disabled)
  .filter((one) => one.tabIndex >= 0 && !one.closest('[inert]'))
  .filter((one) => !one.dataset.reached && !(one.type === 'radio'
    && document.querySelector(`[type=radio][name="${one.name}"][data-reached]`)))
  .map((one) => one.outerHTML.slice(0, 120))"""


def faults(page: Page) -> list[str]:
    """Missing names, broken references, headings out of order, text that is hard to read."""
    found: list[str] = page.evaluate(CHECKS)
    return found


def unreachable(page: Page) -> list[str]:
    """Controls that Tab does not reach, or reaches without showing it."""
    page.evaluate(TO_THE_TOP)
    hidden = []
    for _ in range(MOST_CONTROLS):
        page.keyboard.press("Tab")
        seen: str | None = page.evaluate(REACHED)
        if seen is None:
            break
        if seen:
            hidden.append(f"the focus is not seen: {seen}")
    missed: list[str] = page.evaluate(MISSED)
    return [*hidden, *(f"Tab does not reach it: {one}" for one in missed)]
