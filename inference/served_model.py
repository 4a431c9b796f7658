"""A model that is served: its engine and its text half, which belong together. No torch.

Ids of one tokenizer mean nothing to another model, so whoever prepares a prompt keeps the
`ServedModel` it was prepared with, and nothing of it is given to another.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.config import EngineConfig
from inference.engine import Engine
from inference.events import EventRing
from inference.generator import TextGenerator
from inference.outputs import Runner
from inference.text.chat_template import ChatTemplate
from inference.text.tokenizer import Tokenizer

MakeRunner = Callable[[EngineConfig], Runner]


@dataclass(frozen=True, slots=True)
class TextHalf:
    """What turns text into ids of this model, and back."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate

    @classmethod
    def from_dir(cls, model_dir: Path) -> "TextHalf":
        """
        Raises:
            ModelLoadError: the files are missing or broken.
        """
        tokenizer = Tokenizer.from_dir(model_dir)
        return cls(tokenizer, ChatTemplate.from_dir(model_dir, tokenizer))


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """Compared by identity: the same folder loaded twice is two of them."""

    model_dir: Path
    engine: Engine
    tokenizer: Tokenizer
    generator: TextGenerator
    # Unix seconds.
    loaded_at: float


def start_engine(
    model_dir: Path,
    make_runner: MakeRunner,
    config: Mapping[str, Any],
    *,
    events: EventRing,
    on_end: Callable[[], None],
    changes: Mapping[str, Any],
) -> Engine:
    """An engine that has begun to load.

    Args:
        config: fields of EngineConfig other than the model folder.
        changes: live settings that hold from the first step on.

    Raises:
        InvalidConfig: see `EngineConfig.validate`.
    """
    engine_config = EngineConfig(model_dir=model_dir, **config)
    engine = Engine(engine_config, make_runner(engine_config), events=events, on_end=on_end)
    if changes:
        engine.tune(**changes)
    engine.start()
    return engine


def wait_served(engine: Engine, model_dir: Path, text: TextHalf | None = None) -> ServedModel:
    """The served model once it is loaded; the text half is made meanwhile.

    Raises:
        ModelLoadError: the model cannot be served; the engine has ended.
        EngineDead: the engine has ended.
    """
    try:
        text = text or TextHalf.from_dir(model_dir)
        generator = TextGenerator(engine, text.tokenizer, text.chat_template)
        engine.wait_ready(threading.TIMEOUT_MAX)
    except BaseException:
        engine.shutdown(0.0)
        raise
    generator.grammars.warm_up()
    return ServedModel(model_dir, engine, text.tokenizer, generator, time.time())
