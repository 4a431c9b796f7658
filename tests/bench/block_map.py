"""How smoothly the block map of a large pool scrolls in Chromium, and what its updates weigh.

    python -m tests.bench.block_map --blocks 100000

Prints one JSON object: frames a second while the map is scrolled, the frame times' p50 and p95 in
ms, fills a paint, and bytes and updates a second on the socket. The engine is simulated; the page,
the socket and the browser are real. Frame times of a machine without a GPU are those of software
drawing.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser

from tests.appliance.console.paint_counter import count_paints, scroll
from tests.appliance.console.simulated_process import Server
from tests.appliance.console.simulated_server import PASSWORD
from tests.chromium import chromium, signed_in


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--frames", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        sizes = ("--blocks", str(options.blocks), "--slots", str(options.slots))
        server = Server(Path(folder), *sizes, "--arrivals", "1.6")
        try:
            print(json.dumps(measured(browser, server.url, options.frames)))
        finally:
            server.stop()


def measured(browser: Browser, url: str, frames: int) -> dict[str, Any]:
    updates: list[tuple[int, float]] = []
    state = signed_in(browser, url, "alice", PASSWORD)
    page = browser.new_page(storage_state=state, viewport={"width": 1440, "height": 900})
    page.on("websocket", lambda socket: socket.on("framereceived", lambda text: take(text)))

    def take(text: str) -> None:
        updates.append((len(text), float(json.loads(text)["now"])))

    count_paints(page)
    page.goto(f"{url}/console/")
    page.wait_for_selector("#block-summary[data-total]", state="attached")
    seen = scroll(page, frames)
    times = sorted(seen["times"])
    seconds = updates[-1][1] - updates[0][1]
    return {
        "frames_per_s": round(1000 * len(times) / sum(times), 1),
        "frame_ms_p50": round(statistics.median(times), 1),
        "frame_ms_p95": round(times[int(0.95 * (len(times) - 1))], 1),
        "fills_per_paint": round(seen["fills"] / max(1, seen["paints"])),
        "most_fills": seen["most"],
        "bytes_per_s": round(sum(size for size, _ in updates[1:]) / max(0.001, seconds)),
        "updates_per_s": round((len(updates) - 1) / max(0.001, seconds), 2),
        "first_update_bytes": updates[0][0],
    }


if __name__ == "__main__":
    main()
