"""The measurements themselves: their arithmetic, and that the commands run."""

from pathlib import Path

import pytest

from inference.bench.__main__ import main
from inference.bench.interference import summary
from inference.bench.paths import Step
from tests.inference.tiny_models import save_tiny_model


def scripted(*steps: tuple[int, int, float]) -> list[Step]:
    """From (requests, tokens, milliseconds), one after the other."""
    made, now_s = [], 0.0
    for num_requests, num_tokens, length_ms in steps:
        made.append(Step(num_requests, num_tokens, now_s, now_s + length_ms / 1e3))
        now_s += length_ms / 1e3
    return made


def test_gaps_of_answers_are_told_apart_by_whether_a_prompt_is_computed_beside_them() -> None:
    # A prompt of 20 tokens alone: two whole chunks and a rest that says nothing of a chunk.
    alone = scripted((1, 8, 40), (1, 8, 44), (1, 4, 10))
    steps = scripted(
        *((2, 16, 30), (2, 2, 5), (2, 2, 6), (2, 2, 7)),
        *((3, 8, 50), (3, 8, 60), (3, 8, 70), (3, 4, 20)),
        *((2, 2, 8), (1, 1, 4)),
    )
    found = summary(alone, steps, num_streams=2, prompt_tokens=20)
    assert found.chunk_ms == pytest.approx(42)
    assert found.undisturbed_ms == pytest.approx(6)
    assert found.median_ms == pytest.approx(55)
    assert found.p95_ms == pytest.approx(70), "the nearest of few"
    assert found.ratio == pytest.approx(70 / 42)


@pytest.mark.parametrize("command", ["interference", "paths"])
def test_a_command_measures_a_model_and_prints_a_table(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_tiny_model("llama", tmp_path)
    sizes = {
        "interference": "--streams 2 --context 16 --prompt 100",
        "paths": "--paths torch:float32 --batches 2 --context 32 --prompts 32 --tokens 16",
    }
    assert main([command, "--model", str(tmp_path), "--runs", "1", *sizes[command].split()]) == 0
    lines = capfd.readouterr().out.strip().splitlines()
    assert len(lines) >= 3
    assert "cores, commit" in lines[-1]
