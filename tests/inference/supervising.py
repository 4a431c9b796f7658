"""Model folders and orders for tests of the supervisor, whose engines run on fake runners."""

import json

from inference.errors import EngineDead
from inference.supervisor import SwapOrder
from inference.weights.gguf_tokenizer import build_tokenizer
from tests.inference.chat_templates import CHATML
from tests.inference.faults import DEADLINE_S
from tests.inference.helpers import make_request
from tests.inference.text_models import byte_level_metadata


def model_folders(tmp_path):
    """Two models that differ in name alone."""
    document, config = build_tokenizer(byte_level_metadata())
    found = {}
    for name in ("former", "newer"):
        folder = found[name] = tmp_path / name
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps(document))
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").write_text(CHATML)
    return found


def ends(stream):
    last = None
    while (update := stream.get(DEADLINE_S)) is not None:
        last = update
    return last


def order(folders, name="newer", **changes):
    return SwapOrder(
        **{
            "model": name,
            "resolve": lambda report: folders[name],
            "drain_s": DEADLINE_S,
            **changes,
        }
    )


def kinds(supervisor):
    return [event.kind for event in supervisor.events.since(0)]


def kill(supervisor, faults):
    """End the engine as failing steps do; returns the streams that ended with it."""
    faults.step_error = RuntimeError("boom")
    engine, streams = supervisor.engine, []
    while engine.ending.error is None:
        try:
            streams.append(engine.add_request(make_request(8, 4)))
        except EngineDead:
            break
        ends(streams[-1])
    faults.step_error = None
    return streams
