"""The measurements themselves: their arithmetic, and that the commands run."""

from pathlib import Path

import pytest

from inference.bench.__main__ import main
from inference.bench.floor import Rates, step_work
from inference.bench.interference import summary
from inference.bench.paths import Step, config_of
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


def test_a_step_is_never_faster_than_reading_and_multiplying_let_it(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    work = step_work(tmp_path, reads_groups=True, dtype="float32", kv_dtype="int8")
    assert work.weight_bytes == work.flops_per_row * 2, "4 bytes and 2 operations a number"
    reading, multiplying = Rates(1.0, 1e30), Rates(1e30, 1.0)
    read_bytes = work.weight_bytes + 3 * 100 * work.kv_bytes_per_token
    assert work.floor_ms(reading, 3, 100) == pytest.approx(read_bytes * 1e3)
    assert work.floor_ms(multiplying, 3, 100) == pytest.approx(work.flops_per_row * 3e3)
    (tmp_path / "quantized.safetensors").write_bytes(b"x" * 77)
    packed = step_work(tmp_path, reads_groups=True, dtype="float32", kv_dtype="int8")
    assert packed.weight_bytes == 77


def test_a_path_names_kernels_weights_and_keys(tmp_path: Path) -> None:
    config = config_of("native:bfloat16:avx2:dense:int8", tmp_path, 4)
    assert (config.cpu_backend, config.dtype, config.cpu_kernels) == ("native", "bfloat16", "avx2")
    assert (config.use_groups, config.kv_dtype) == (False, "int8")


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
