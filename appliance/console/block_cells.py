"""The block map as consoles get it: every cell with the tick at which it last changed.

A delta for any base tick is then one comparison, so a console that missed updates gets one merged
delta instead of all it missed. Holders get codes that stay while a cell uses them: the engine
numbers them anew at every step, which would make unchanged cells look changed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

FREE, CACHED = -1, -2
_NO_POSITION = -1
# On the wire in place of a block's number of tokens: it is full, or nobody holds it any more.
FULL = -1

Ints = NDArray[np.int64]


class BlockCells:
    """`handle_of` turns a request id into the small number that stands for it on the wire."""

    def __init__(self, handle_of: Callable[[str], int]) -> None:
        self._handle_of = handle_of
        self.step = -1
        self._seen: object = None
        self.size_version = 0
        self._codes: Ints = np.empty(0, np.int64)
        self._positions: Ints = np.empty(0, np.int64)
        self._versions: Ints = np.empty(0, np.int64)
        self._block_size = 0
        # Holder (request ids) -> code, and code -> (handles, tick at which the code was given).
        self._code_of: dict[tuple[str, ...], int] = {}
        self._holders: dict[int, tuple[list[int], int]] = {}
        self._next_code = 0
        # Block -> tokens in it, and the tick of its last change; FULL for full or not held.
        self._partial: dict[int, tuple[int, int]] = {}

    def observe(self, block_map: Mapping[str, Any], block_size: int, tick: int) -> None:
        """Take the engine's map over; does nothing with the very map that it saw last.

        The step does not tell: an abort moves blocks between two steps.
        """
        if block_map["cells"] is self._seen:
            return
        self._seen = block_map["cells"]
        self.step = int(block_map["step"])
        cells = np.asarray(self._seen, dtype=np.int64)
        if len(cells) != len(self._codes) or block_size != self._block_size:
            self._resize(len(cells), block_size, tick)
        codes = self._stable_codes(cells, block_map["holders"], tick)
        positions = np.full(len(cells), _NO_POSITION, np.int64)
        starts = block_map["token_start"]
        if starts:
            blocks = np.fromiter((int(block) for block in starts), np.int64, len(starts))
            positions[blocks] = np.fromiter(starts.values(), np.int64, len(starts))
        changed = (codes != self._codes) | (positions != self._positions)
        self._versions[changed] = tick
        self._codes, self._positions = codes, positions
        self._observe_partial(block_map["partial"], tick)

    def delta_since(self, base: int) -> dict[str, Any]:
        """What changed after tick `base`; the whole map when the console never saw one.

        `runs` is flat: start, length, code, first token position, direction, and so on. Positions
        inside a run go up or down by a block's size, or are absent (direction 0).
        """
        whole = base < self.size_version
        changed = np.flatnonzero(self._versions > (-1 if whole else base))
        delta: dict[str, Any] = {"step": self.step}
        if whole:
            delta["total"] = len(self._codes)
            base = -1
        if len(changed):
            delta["runs"] = self._runs(changed)
        holders = [
            [code, *handles] for code, (handles, given) in self._holders.items() if given > base
        ]
        if holders:
            delta["holders"] = holders
        partial = [
            number
            for block, (tokens, version) in self._partial.items()
            if version > base and (tokens != FULL or not whole)
            for number in (block, tokens)
        ]
        if partial:
            delta["partial"] = partial
        return delta

    def forget_before(self, tick: int) -> None:
        """Drop what only a console older than `tick` would still need to hear of."""
        for block, (tokens, version) in list(self._partial.items()):
            if tokens == FULL and version < tick:
                del self._partial[block]

    def _resize(self, total: int, block_size: int, tick: int) -> None:
        self._block_size = block_size
        self.size_version = tick
        self._codes = np.full(total, FREE, np.int64)
        self._positions = np.full(total, _NO_POSITION, np.int64)
        self._versions = np.full(total, tick, np.int64)
        self._partial = {}

    def _stable_codes(self, cells: Ints, holders: Sequence[Sequence[str]], tick: int) -> Ints:
        used = np.bincount(cells + 2, minlength=len(holders) + 2)[2:]
        lookup = np.empty(len(holders) + 2, np.int64)
        lookup[0], lookup[1] = CACHED, FREE
        kept: dict[tuple[str, ...], int] = {}
        for index, request_ids in enumerate(holders):
            if not used[index]:
                continue
            holder = tuple(request_ids)
            code = self._code_of.get(holder)
            if code is None:
                code = self._next_code
                self._next_code += 1
                self._holders[code] = ([self._handle_of(name) for name in holder], tick)
            kept[holder] = code
            lookup[index + 2] = code
        for holder, code in self._code_of.items():
            if holder not in kept:
                del self._holders[code]
        self._code_of = kept
        return lookup[cells + 2]

    def _observe_partial(self, partial: Mapping[Any, int], tick: int) -> None:
        now = {int(block): int(tokens) for block, tokens in partial.items()}
        for block, (tokens, _version) in self._partial.items():
            if tokens != FULL and block not in now:
                self._partial[block] = (FULL, tick)
        for block, tokens in now.items():
            known = self._partial.get(block)
            if known is None or known[0] != tokens:
                self._partial[block] = (tokens, tick)

    def _runs(self, changed: Ints) -> list[int]:
        codes, positions = self._codes[changed], self._positions[changed]
        if len(changed) == 1:
            starts = np.zeros(1, np.int64)
            link = np.zeros(0, np.int64)
        else:
            # How each cell follows the one before: +1 or -1 by a block's size, +1 for cells
            # without tokens, 0 when it does not.
            steps = np.diff(positions)
            empty = (positions[1:] == _NO_POSITION) & (positions[:-1] == _NO_POSITION)
            link = np.where(empty | (steps == self._block_size), 1, 0)
            link = np.where(~empty & (steps == -self._block_size), -1, link)
            link[(np.diff(changed) != 1) | (np.diff(codes) != 0)] = 0
            turns = np.zeros(len(link), bool)
            turns[1:] = (link[1:] != link[:-1]) & (link[:-1] != 0)
            starts = np.concatenate(([0], np.flatnonzero((link == 0) | turns) + 1))
        lengths = np.diff(np.append(starts, len(changed)))
        directions = np.ones(len(starts), np.int64)
        inside = lengths > 1
        directions[inside] = link[starts[inside]]
        directions[positions[starts] == _NO_POSITION] = 0
        table = np.stack(
            [changed[starts], lengths, codes[starts], positions[starts], directions], axis=1
        )
        flat: list[int] = table.ravel().tolist()
        return flat
