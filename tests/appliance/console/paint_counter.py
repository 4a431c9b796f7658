"""What the block map costs a browser, counted inside the page: paints, fills, frames.

Work is counted, not time: that holds on any machine. `tests/bench/block_map.py` prints the times.
"""

from typing import Any

from playwright.sync_api import Page

# Before any script of the page: counts what is drawn on the map's canvas.
COUNT = """() => {
  window.counted = { fills: 0, paints: 0, most: 0 };
  const own = CanvasRenderingContext2D.prototype, now = window.counted;
  let inPaint = 0;
  const wrap = (name, before) => {
    const real = own[name];
    own[name] = function (...args) {
      if (this.canvas.id === 'block-map') before();
      return real.apply(this, args);
    };
  };
  // A paint begins by clearing the whole canvas with the plain transform.
  wrap('setTransform', () => {
    now.most = Math.max(now.most, inPaint);
    inPaint = 0;
    now.paints += 1;
  });
  wrap('fillRect', () => { now.fills += 1; inPaint += 1; });
}"""

# Scrolls by a step in each of `frames` animation frames; returns counts and the frames' times.
SCROLL = """async ([frames, step]) => {
  const box = document.querySelector('.map-scroll'), now = window.counted, times = [];
  Object.assign(now, { fills: 0, paints: 0, most: 0 });
  const most = box.scrollHeight - box.clientHeight;
  let last = performance.now(), way = 1;
  for (let frame = 0; frame < frames; frame++) {
    if (box.scrollTop + step * way > most || box.scrollTop + step * way < 0) way = -way;
    box.scrollTop += step * way;
    await new Promise((resolve) => requestAnimationFrame(resolve));
    times.push(performance.now() - last);
    last = performance.now();
  }
  await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
  return { ...now, times, height: box.clientHeight, scroll: box.scrollHeight,
           width: document.querySelector('#block-map').width };
}"""


def count_paints(page: Page) -> None:
    """Call before the page is opened."""
    page.add_init_script(f"({COUNT})()")


def scroll(page: Page, frames: int, step: int = 40) -> dict[str, Any]:
    found: dict[str, Any] = page.evaluate(SCROLL, [frames, step])
    return found
