"""The measured steps run, in a small shape and without a clock or graphs, where no GPU is."""

from dataclasses import replace

import torch

from inference.models.spec import LayerSpec
from tests.gpu import model_8b
from tests.gpu.report import Report


def test_linears_and_steps_are_measured_in_every_form(monkeypatch) -> None:
    shape = replace(
        model_8b.spec(),
        vocab_size=90,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        layers=(LayerSpec(),) * 2,
        ropes=(replace(model_8b.spec().ropes[0], rotary_dim=16),),
    )
    monkeypatch.setattr(model_8b, "spec", lambda: shape)
    monkeypatch.setattr(model_8b, "BATCHES", (1, 3))
    monkeypatch.setattr(model_8b, "CudaGraphs", lambda: lambda call: call)
    answers: list[torch.Tensor] = []

    def seconds(call) -> float:
        answers.append(call())
        return 2.0

    monkeypatch.setattr(model_8b, "seconds", seconds)
    torch.set_num_threads(1)
    report = Report()
    rates = {"copy": 1e5}
    model_8b.measure_linears(report, rates, torch.device("cpu"))
    model_8b.measure_steps(report, rates, torch.device("cpu"))
    assert all(verdict == "" for _, verdict, _ in report.rows), report.rows
    assert [name for name, _, _ in report.rows] == [
        "8B shape: a layer's linears, 4 bits, 1 rows",
        "8B shape: a layer's linears, 4 bits, 3 rows",
        "8B shape: a layer's linears, 8 bits, 1 rows",
        "8B shape: a layer's linears, 8 bits, 3 rows",
        "8B shape, bf16: graphs made",
        "8B shape, bf16: decode step, 1 x 1024",
        "8B shape, bf16: decode step, 3 x 1024",
        "8B shape, 4-bit weights, 8-bit KV: graphs made",
        "8B shape, 4-bit weights, 8-bit KV: decode step, 1 x 1024",
        "8B shape, 4-bit weights, 8-bit KV: decode step, 3 x 1024",
    ]
    assert [tuple(answer.shape) for answer in answers[4:]] == [(1, 90), (3, 90)] * 2
    assert all(answer.isfinite().all() for answer in answers)
    # 2 bytes a number of keys and values of 1,024 tokens: 2 layers, 2 heads of 16.
    weights = 2 * (64 * 128 + 64 * 64 + 64 * 192 + 96 * 64) + 64 * 90
    floor = (2 * weights + 2 * 2 * 2 * 2 * 16 * 1024) / 1e5
    assert f"{2.0 / floor:.2f} of its floor" in report.rows[5][2]
