"""What an open console costs: bytes a second of a large, busy pool."""

import orjson

from appliance.console.picture import NEVER, Picture
from tests.appliance.console.simulated_backend import SimulatedBackend

LOOK_EVERY_S = 0.25


def test_a_busy_pool_of_100000_blocks_takes_less_than_20_kb_a_second() -> None:
    owners = [(str(number), f"user{number}") for number in range(12)]
    engine = SimulatedBackend(owners, total=100_000, slots=32, arrivals_per_s=1.6)
    engine.advance(60)
    picture = Picture()
    sizes = []
    event_id, now = 0, 0.0
    for look in range(41):
        events = engine.events_since(event_id)
        event_id = events[-1]["event_id"] if events else event_id
        told = [{**event, "at": now} for event in events]
        picture.observe(engine.state(), engine.block_map(), told, now=now, epoch=0.0)
        base = NEVER if look == 0 else picture.tick - 1
        sizes.append(len(orjson.dumps(picture.delta_since(base))))
        engine.advance(LOOK_EVERY_S, LOOK_EVERY_S)
        now += LOOK_EVERY_S
    assert len(engine.state()["requests"]) >= 16, "the pool is not busy"
    updates = sizes[1:]
    assert sum(updates) / (len(updates) * LOOK_EVERY_S) < 20_000
    assert sizes[0] < 200_000
