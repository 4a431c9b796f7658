"""Deltas of the block map put together again give the engine's own map."""

import random
from typing import Any

import orjson

from appliance.console.block_cells import BlockCells
from tests.appliance.console.map_reader import MapReader, engine_cells

BLOCK = 16


class Handles:
    def __init__(self) -> None:
        self.of: dict[str, int] = {}

    def __call__(self, name: str) -> int:
        return self.of.setdefault(name, len(self.of))

    @property
    def names(self) -> dict[int, str]:
        return {number: name for name, number in self.of.items()}


def random_map(rand: random.Random, total: int, step: int) -> dict[str, Any]:
    """Runs of blocks, rising and falling in tokens, shared ones, cached ones, in any order."""
    cells: list[int] = []
    token_start: dict[int, int] = {}
    holders = [[f"r-{n}"] for n in range(5)] + [["r-1", "r-2"], ["r-0", "r-1", "r-3"]]
    rand.shuffle(holders)
    while len(cells) < total:
        cell = rand.randrange(-2, len(holders))
        at, direction = rand.randrange(400) + 40, rand.choice((1, -1, 0, 3))
        for offset in range(min(rand.randrange(1, 30), total - len(cells))):
            if cell >= 0:
                token_start[len(cells)] = (at + direction * offset) * BLOCK
            cells.append(cell)
    partial = {block: rand.randrange(1, BLOCK) for block in list(token_start)[::7]}
    return {
        "step": step,
        "cells": cells,
        "holders": holders,
        "partial": partial,
        "token_start": token_start,
    }


def test_deltas_put_together_give_the_engines_map_also_after_missed_ones() -> None:
    rand = random.Random(7)
    handles = Handles()
    cells = BlockCells(handles)
    steady, slow, slow_base = MapReader(), MapReader(), -1
    engine_map: dict[str, Any] = {}
    for tick in range(1, 40):
        engine_map = random_map(rand, 300, tick)
        if rand.random() < 0.5 and tick > 1:
            # A small change, as between two steps.
            block = rand.randrange(300)
            engine_map["cells"][block] = -2
            engine_map["token_start"].pop(block, None)
            engine_map["partial"].pop(block, None)
        cells.observe(engine_map, BLOCK, tick)
        steady.apply(cells.delta_since(tick - 1 if tick > 1 else -1))
        assert steady.cells(handles.names) == engine_cells(engine_map)
        assert steady.partial == engine_map["partial"]
        if rand.random() < 0.3:
            slow.apply(cells.delta_since(slow_base))
            slow_base = tick
            assert slow.cells(handles.names) == engine_cells(engine_map)
            assert slow.partial == engine_map["partial"]


def test_a_step_seen_already_costs_nothing_and_renumbered_holders_change_no_cell() -> None:
    handles = Handles()
    cells = BlockCells(handles)
    first = {
        "step": 1,
        "cells": [0, 0, 1, -1, -2],
        "holders": [["a"], ["a", "b"]],
        "partial": {},
        "token_start": {0: 16, 1: 32, 2: 0},
    }
    cells.observe(first, BLOCK, 1)
    cells.observe(first, BLOCK, 2)
    assert "runs" not in cells.delta_since(1)
    renumbered = {**first, "step": 2, "cells": [1, 1, 0, -1, -2], "holders": [["a", "b"], ["a"]]}
    cells.observe(renumbered, BLOCK, 3)
    assert cells.delta_since(1) == {"step": 2}


def test_another_pool_size_is_sent_whole() -> None:
    cells = BlockCells(Handles())
    empty = {"holders": [], "partial": {}, "token_start": {}}
    cells.observe({"step": 1, "cells": [-1] * 4, **empty}, BLOCK, 1)
    cells.observe({"step": 1, "cells": [-1] * 9, **empty}, BLOCK, 2)
    assert cells.delta_since(1) == {"step": 1, "total": 9, "runs": [0, 9, -1, -1, 0]}


def test_an_update_of_100000_blocks_with_few_changes_is_small() -> None:
    total, running = 100_000, 32
    each = total // (running + 8)
    owners = [block // each if block // each < running else -1 for block in range(total)]
    token_start = {b: (b % each) * BLOCK for b, owner in enumerate(owners) if owner >= 0}
    engine_map = {
        "step": 1,
        "cells": owners,
        "holders": [[f"r-{n}"] for n in range(running)],
        "partial": {n * each + each - 1: 5 for n in range(running)},
        "token_start": token_start,
    }
    cells = BlockCells(Handles())
    cells.observe(engine_map, BLOCK, 1)
    assert len(orjson.dumps(cells.delta_since(-1))) < 4_000
    grown = {**engine_map, "step": 2, "cells": list(owners)}
    free = running * each
    for number in range(running):
        grown["cells"][free + number] = number
        grown["token_start"] = {**grown["token_start"], free + number: each * BLOCK}
    grown["partial"] = {free + number: 1 for number in range(running)}
    cells.observe(grown, BLOCK, 2)
    assert len(orjson.dumps(cells.delta_since(1))) < 2_000
    assert len(orjson.dumps(cells.delta_since(2))) < 20


def test_blocks_given_back_without_a_step_are_told() -> None:
    """The last running request is aborted: nothing is computed, and its blocks are free."""
    handles = Handles()
    cells, reader = BlockCells(handles), MapReader()
    held = {
        "step": 7,
        "cells": [0, 0, -1],
        "holders": [["r-1"]],
        "partial": {1: 3},
        "token_start": {0: 0, 1: 16},
    }
    cells.observe(held, BLOCK, 1)
    reader.apply(cells.delta_since(-1))
    free = {**held, "cells": [-2, -1, -1], "holders": [], "partial": {}, "token_start": {}}
    cells.observe(free, BLOCK, 2)
    reader.apply(cells.delta_since(1))
    assert reader.cells(handles.names) == engine_cells(free)
    assert reader.partial == {}
