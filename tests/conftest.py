"""Fixtures that every part may need. Imports nothing heavy: planning tests run without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

try:
    from hypothesis import HealthCheck, settings
except ImportError:
    # Machines that only run the GPU script have none, and no test that needs it.
    pass
else:
    # A slow machine is no fault of a test.
    settings.register_profile(
        "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("any machine")

ROOT = Path(__file__).resolve().parent.parent
# Kept between runs: git-ignored, made once.
MODEL_CACHE = ROOT / "var" / "test-models"


@pytest.fixture(scope="session")
def bundled_model_dir() -> Path:
    """The folder of the real bundled model, fetched and imported once, then kept."""
    from inference.model_store import ModelStore

    store = ModelStore(MODEL_CACHE)
    return store.ensure_default(lambda share, text: None)


@pytest.fixture
def run_python() -> "RunPython":
    """Run a piece of Python in a process of its own; for claims about what an import loads."""
    return RunPython()


class RunPython:
    def __call__(self, code: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()
