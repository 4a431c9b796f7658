"""Engines over a fake runner: driven by the test, or with their own thread; one with text."""

from collections.abc import Iterator

import pytest

from inference.engine import Engine
from tests.inference.engine_driving import DEADLINE_S, Clock
from tests.inference.generating import Serving
from tests.inference.helpers import FakeRunner, fake_config


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def runner():
    return FakeRunner()


@pytest.fixture
def engine(runner):
    """Loaded, driven by the test."""
    engine = Engine(fake_config(), runner)
    engine.load()
    yield engine
    engine.shutdown(0.0)


@pytest.fixture
def running(runner):
    """With its own thread."""
    engine = Engine(fake_config(), runner)
    engine.start()
    engine.wait_ready(DEADLINE_S)
    yield engine
    engine.shutdown(0.0)


@pytest.fixture
def serving() -> Iterator[Serving]:
    made = Serving().start()
    yield made
    made.engine.shutdown(0.0)
