"""Reads map deltas as the browser does, so that tests can compare with the engine's map."""

from collections.abc import Mapping
from typing import Any


class MapReader:
    def __init__(self) -> None:
        self.codes: list[int] = []
        self.positions: list[int] = []
        self.holders: dict[int, list[int]] = {}
        self.partial: dict[int, int] = {}

    def apply(self, delta: Mapping[str, Any], block_size: int = 16) -> None:
        if "total" in delta:
            self.codes = [-1] * delta["total"]
            self.positions = [-1] * delta["total"]
            self.holders, self.partial = {}, {}
        for code, *handles in delta.get("holders", []):
            self.holders[code] = handles
        runs = delta.get("runs", [])
        for at in range(0, len(runs), 5):
            start, length, code, position, direction = runs[at : at + 5]
            for offset in range(length):
                self.codes[start + offset] = code
                self.positions[start + offset] = position + direction * offset * block_size
        pairs = delta.get("partial", [])
        for block, tokens in zip(pairs[::2], pairs[1::2], strict=True):
            if tokens >= 0:
                self.partial[block] = tokens
            else:
                self.partial.pop(block, None)

    def cells(self, names: Mapping[int, str]) -> list[Any]:
        """Every cell as (request ids, first token), "free" or "cached"."""
        found: list[Any] = []
        for code, position in zip(self.codes, self.positions, strict=True):
            if code < 0:
                found.append("free" if code == -1 else "cached")
            else:
                found.append((tuple(names[h] for h in self.holders[code]), position))
        return found


def engine_cells(block_map: Mapping[str, Any]) -> list[Any]:
    found: list[Any] = []
    for block, cell in enumerate(block_map["cells"]):
        if cell < 0:
            found.append("free" if cell == -1 else "cached")
        else:
            found.append((tuple(block_map["holders"][cell]), block_map["token_start"][block]))
    return found
