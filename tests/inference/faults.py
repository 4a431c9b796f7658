"""Faults at the seam between engine and runner, for tests: the engine cannot tell them from real.

`make_runner` of `EngineSupervisor` (and of `EngineBackend`) is where they are put in.
"""

import threading
from collections.abc import Callable
from dataclasses import replace

from inference.config import EngineConfig
from inference.outputs import RunnerInfo
from tests.inference.helpers import FakeRunner

DEADLINE_S = 20.0


class Faults:
    """What happens to the runners that `make_runner` makes; changed by a test at any time."""

    def __init__(self, **options: object) -> None:
        self.options = options
        self.runners: list[NamedRunner] = []
        # Folder name -> the error of its next load.
        self.load_errors: dict[str, Exception] = {}
        # Raised by every step.
        self.step_error: Exception | None = None
        # Cleared, a step hangs in it until it is set again.
        self.go_on = threading.Event()
        self.go_on.set()
        self.is_hanging = threading.Event()

    def make_runner(self, config: EngineConfig) -> "NamedRunner":
        runner = NamedRunner(config.model_dir.name, self)
        self.runners.append(runner)
        return runner

    @property
    def names(self) -> list[str]:
        return [runner.name for runner in self.runners]


class NamedRunner(FakeRunner):
    def __init__(self, name: str, faults: Faults) -> None:
        super().__init__(**faults.options)  # type: ignore[arg-type]
        self.name = name
        self.info = replace(self.info, model_name=name)
        self.before_step = self._fault
        self._faults = faults

    def load(self, on_progress: Callable[[float, str], None]) -> RunnerInfo:
        error = self._faults.load_errors.pop(self.name, None)
        if error is not None:
            raise error
        return super().load(on_progress)

    def _fault(self, output: object) -> None:
        if self._faults.step_error is not None:
            raise self._faults.step_error
        if not self._faults.go_on.is_set():
            self._faults.is_hanging.set()
            assert self._faults.go_on.wait(DEADLINE_S), "the test never let the step return"
