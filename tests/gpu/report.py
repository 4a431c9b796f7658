"""The table that the script prints, and the time that is left for it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

# The script ends within four minutes; what has not begun by then is named and left out.
BUDGET_S = 220.0


@dataclass
class Report:
    started_s: float = field(default_factory=time.monotonic)
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    has_failed: bool = False

    def check(self, name: str, run: Callable[[], str]) -> None:
        """Run a correctness check; what it raises is a failure and ends nothing else."""
        self._run(name, run, is_check=True)

    def measure(self, name: str, run: Callable[[], str]) -> None:
        """Run a timing, which passes or misses its goal without failing the script."""
        self._run(name, run, is_check=False)

    def _run(self, name: str, run: Callable[[], str], *, is_check: bool) -> None:
        if time.monotonic() - self.started_s > BUDGET_S:
            self.rows.append((name, "not run", "no time was left"))
            self.has_failed |= is_check
            return
        began = time.monotonic()
        try:
            detail, verdict = run(), "ok" if is_check else ""
        except Exception as exc:
            detail, verdict = f"{type(exc).__name__}: {str(exc).strip()[:300]}", "FAILED"
            self.has_failed |= is_check
        took = f"{time.monotonic() - began:.1f} s"
        self.rows.append((name, verdict, f"{detail} ({took})" if is_check else detail))

    def print(self, title: str) -> None:
        width = max(len(name) for name, _, _ in self.rows)
        print(title)
        for name, verdict, detail in self.rows:
            print(f"{name:<{width}}  {verdict:<7}  {detail}")
        print("correctness:", "FAILED" if self.has_failed else "held")
