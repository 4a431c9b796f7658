"""Every kernel against its reference, and the whole engine against transformers."""

import functools
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from inference.config import EngineConfig
from inference.runner.model_runner import ModelRunner
from kernels import int8_kv
from kernels.backends import Backend
from kernels.kv_cache_write import kv_cache_write
from kernels.paged_attention import paged_attention
from kernels.quant_linear import quant_linear
from kernels.quant_linear.packing import QuantWeight, pack
from kernels.quant_linear.super_blocks import SUPER_BLOCK_BITS, pack_super_blocks
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary_kv_write import rotary_kv_write
from kernels.sampling import penalise, sample
from kernels.silu_and_mul import silu_and_mul
from tests.gpu.report import Report
from tests.inference.group_folders import write_groups
from tests.inference.tiny_models import (
    StepDriver,
    greedy_of_transformers,
    make_request,
    save_tiny_model,
)
from tests.kernels.group_cases import random_groups
from tests.kernels_triton.paged import problem

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# As in kernels/README.md.
ATTENTION_TOLERANCE = {FP32: 4e-6, BF16: 2e-2, FP16: 3e-3}
BOTH = (Backend.TRITON, Backend.REFERENCE)


def check_all(report: Report, device: torch.device, *, is_small: bool) -> None:
    rng = torch.Generator().manual_seed(7)
    plain, full = [(None, None)], [(None, None), (100, None), (77, 20.0)]
    shapes = [(64, BF16), (96, FP16)] if is_small else _all_shapes()
    for head_dim, dtype in shapes:
        # Each option is a kernel of its own to compile: not for every shape.
        options = full if (head_dim, dtype) in _WITH_OPTIONS and not is_small else plain
        for window, cap in options:
            report.check(
                f"attention {head_dim} {str(dtype).removeprefix('torch.')}"
                + (f" window {window} cap {cap}" if window else ""),
                functools.partial(_attention, rng, device, head_dim, dtype, window, cap, is_small),
            )
    for dtype in (BF16, FP16):
        report.check(
            f"attention 128 {str(dtype).removeprefix('torch.')} over 8 bits",
            functools.partial(_attention_over_8_bits, rng, device, dtype, is_small),
        )
    for bits, with_mins in ((4, False), (4, True), (8, False)):
        report.check(
            f"weights in {bits} bits{' with mins' if with_mins else ''}",
            functools.partial(_groups, rng, device, bits, with_mins, is_small),
        )
    for bits in SUPER_BLOCK_BITS:
        report.check(
            f"weights in Q{bits}_K", functools.partial(_super_blocks, rng, device, bits, is_small)
        )
    report.check("norms", lambda: _norms(rng, device))
    report.check("rotary and cache writes", lambda: _rotary_and_write(rng, device))
    report.check("silu_and_mul", lambda: _silu(rng, device))
    report.check("sampling", lambda: _sampling(rng, device, 300 if is_small else 128_256))
    report.check(
        "engine llama fp32 over 8 bits = the CPU's", lambda: _engine_in_8_bits(device, is_small)
    )
    report.check(
        "engine llama bf16, 4- and 8-bit weights", lambda: _engine_with_groups(device, is_small)
    )
    families = (
        ("llama",) if is_small else ("llama", "mistral", "qwen3", "gemma2", "granite", "olmo2")
    )
    for family in families:
        report.check(
            f"engine {family} fp32 = transformers",
            lambda f=family: _engine(f, device, is_small),
        )


_WITH_OPTIONS = {(64, FP16), (128, BF16), (256, BF16)}


def _all_shapes() -> list[tuple[int, torch.dtype]]:
    return [(d, t) for d in (64, 80, 96, 128, 256) for t in (BF16, FP16)] + [(128, FP32)]


def _near(got: Tensor, want: Tensor, tolerance: float) -> float:
    torch.testing.assert_close(got.float(), want.float(), atol=tolerance, rtol=tolerance)
    return float((got.float() - want.float()).abs().max())


def _attention(
    rng: torch.Generator,
    device: torch.device,
    head_dim: int,
    dtype: torch.dtype,
    window: int | None,
    cap: float | None,
    is_small: bool,
) -> str:
    lengths = (
        [(1, 70), (1, 3), (5, 40)]
        if is_small
        else [(1, 3000), (1, 1), (1, 517), (300, 900), (70, 70), (1, 9)]
    )
    heads = (3, 1) if is_small else (14, 2)
    given = problem(rng, lengths, heads=heads, head_dim=head_dim, block_size=16, dtype=dtype)
    given = {name: tensor.to(device) for name, tensor in given.items()}
    exact = {name: t.float() if t.is_floating_point() else t for name, t in given.items()}
    options = {"scale": head_dim**-0.5, "sliding_window": window, "soft_cap": cap}
    got = paged_attention(**given, **options, num_decodes=2, backend=Backend.TRITON)
    want = paged_attention(**exact, **options, backend=Backend.REFERENCE)
    return f"largest difference {_near(got, want, ATTENTION_TOLERANCE[dtype]):.1e}"


def _attention_over_8_bits(
    rng: torch.Generator, device: torch.device, dtype: torch.dtype, is_small: bool
) -> str:
    lengths = [(1, 70), (5, 40)] if is_small else [(1, 3000), (1, 1), (300, 900), (1, 9)]
    heads = (3, 1) if is_small else (14, 2)
    given = problem(rng, lengths, heads=heads, head_dim=128, block_size=16, dtype=FP32)
    given = {name: tensor.to(device) for name, tensor in given.items()}
    packed, exact = dict(given), dict(given)
    for name in ("key", "value"):
        numbers, scales = int8_kv.quantise(given[f"{name}_cache"])
        packed |= {f"{name}_cache": numbers, f"{name}_scales": scales}
        exact[f"{name}_cache"] = int8_kv.dequantise(numbers, scales)
    packed["query"] = given["query"].to(dtype)
    exact["query"] = packed["query"].float()
    got = paged_attention(**packed, scale=128**-0.5, backend=Backend.TRITON)
    want = paged_attention(**exact, scale=128**-0.5, backend=Backend.REFERENCE)
    return f"largest difference {_near(got, want, ATTENTION_TOLERANCE[dtype]):.1e}"


def _groups(
    rng: torch.Generator, device: torch.device, bits: int, with_mins: bool, is_small: bool
) -> str:
    num_columns, depth = (70, 96) if is_small else (1000, 4192)
    groups = random_groups(rng, num_columns, depth, bits=bits, with_mins=with_mins)
    mins = None if groups.mins is None else groups.mins.to(device)
    weight = pack(groups.quants.to(device), groups.scales.to(device), mins)
    return _quant_linear(rng, weight, is_small)


def _super_blocks(rng: torch.Generator, device: torch.device, bits: int, is_small: bool) -> str:
    """Any bytes are valid blocks; only the fp16 numbers are kept small and finite."""
    num_columns, num_blocks = (70, 1) if is_small else (1000, 17)
    places, size = {4: ((0, 2), 144), 5: ((0, 2), 176), 6: ((208,), 210)}[bits]
    blocks = torch.randint(
        0, 256, (num_columns, num_blocks, size), generator=rng, dtype=torch.uint8
    )
    for place in places:
        small = torch.rand(num_columns, num_blocks, 1, generator=rng).half() / 20_000
        blocks[..., place : place + 2] = small.view(torch.uint8)
    return _quant_linear(rng, pack_super_blocks(blocks.flatten(1).to(device), bits), is_small)


def _quant_linear(rng: torch.Generator, weight: QuantWeight, is_small: bool) -> str:
    worst = 0.0
    device = weight.quants.device
    for num_rows in (1, 40) if is_small else (1, 16, 33, 64):
        for dtype in (BF16, FP16):
            inputs = torch.randn(num_rows, weight.depth, generator=rng).to(device, dtype)
            bias = torch.randn(weight.num_columns, generator=rng).to(device, dtype)
            got, want = (quant_linear(inputs, weight, bias, backend=each) for each in BOTH)
            worst = max(worst, _near(got, want, max(torch.finfo(dtype).eps, 3e-5)))
    return f"largest difference {worst:.1e}"


def _norms(rng: torch.Generator, device: torch.device) -> str:
    worst = 0.0
    for dtype in (BF16, FP16, FP32):
        residual, change = (torch.randn(2, 33, 4096, generator=rng).to(device, dtype)).unbind()
        weight = torch.randn(4096, generator=rng).to(device)
        tolerance = max(torch.finfo(dtype).eps, 2e-6)
        got, want = (rms_norm(residual, weight, 1e-5, backend=each) for each in BOTH)
        worst = max(worst, _near(got, want, tolerance))
        got, want = (add_rms_norm(residual, change, weight, 1e-5, backend=each) for each in BOTH)
        assert torch.equal(got[0], want[0]), f"the sum in {dtype} is not the sum"
        worst = max(worst, _near(got[1], want[1], tolerance))
    return f"largest difference {worst:.1e}"


def _rotary_and_write(rng: torch.Generator, device: torch.device) -> str:
    slots = torch.randperm(64, generator=rng)[:9].to(device)
    slots[3] = -1
    angles = torch.rand(9, 64, generator=rng) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).to(device)
    for dtype in (BF16, FP16, FP32):
        heads = torch.randn(9, 20, 128, generator=rng).to(device, dtype)
        results = []
        for backend in BOTH:
            caches = torch.zeros(4, 4, 16, 4, 128, dtype=dtype, device=device)
            query = rotary_kv_write(
                heads[:, :16], heads[:, 16:], cos_sin, caches[0], caches[1], slots, backend=backend
            )
            kv_cache_write(
                heads[:, :4], heads[:, 16:], caches[2], caches[3], slots, backend=backend
            )
            results.append((query, caches))
        tolerance = max(2 * torch.finfo(dtype).eps, 2e-6)
        for got, want in zip(*results, strict=True):
            _near(got, want, tolerance)
        got, want = (_written_in_8_bits(heads, cos_sin, slots, each) for each in BOTH)
        # A number halfway between two of 8 bits may go to either.
        _near(got[0], want[0], 1.01 * float(want[1].max()))
        _near(got[1], want[1], tolerance)
    return "as the reference"


def _written_in_8_bits(
    heads: Tensor, cos_sin: Tensor, slots: Tensor, backend: Backend
) -> tuple[Tensor, Tensor]:
    """What the caches stand for after both writes, and their scales."""
    caches = torch.zeros(4, 4, 16, 4, 128, dtype=torch.int8, device=heads.device)
    scales = torch.zeros(4, 4, 16, 4, device=heads.device)
    rotary_kv_write(
        heads[:, :16],
        heads[:, 16:],
        cos_sin,
        caches[0],
        caches[1],
        slots,
        key_scales=scales[0],
        value_scales=scales[1],
        backend=backend,
    )
    kv_cache_write(
        heads[:, :4],
        heads[:, 16:],
        caches[2],
        caches[3],
        slots,
        key_scales=scales[2],
        value_scales=scales[3],
        backend=backend,
    )
    return int8_kv.dequantise(caches, scales), scales


def _silu(rng: torch.Generator, device: torch.device) -> str:
    for dtype in (BF16, FP16, FP32):
        gate_up = (torch.randn(7, 2 * 1500, generator=rng) * 4).to(device, dtype)
        got, want = (silu_and_mul(gate_up, backend=each) for each in BOTH)
        _near(got, want, max(torch.finfo(dtype).eps, 2e-6))
    return "as the reference"


def _sampling(rng: torch.Generator, device: torch.device, vocab_size: int) -> str:
    rows = 8
    logits = (torch.randn(rows, vocab_size, generator=rng) * 3).to(device)
    numbers = torch.arange(rows, device=device)

    def row(values: list[float]) -> Tensor:
        return torch.tensor(values * 2, device=device)

    options = {
        "temperature": row([0.0, 0.7, 1.0, 1.3]),
        "top_k": row([0, 0, 50, 5]).long(),
        "top_p": row([1.0, 0.9, 0.8, 1.0]),
        "min_p": row([0.0, 0.0, 0.0, 0.1]),
    }
    got, want = (sample(logits, numbers * 77, numbers, **options, backend=each) for each in BOTH)
    assert (got != want).sum() <= 1, f"drew {got.tolist()}, the reference {want.tolist()}"
    factors = {
        name: torch.full((rows,), 1.5, device=device)
        for name in ("repetition", "presence", "frequency")
    }
    copies = [logits.clone() for _ in BOTH]
    for each, copy in zip(BOTH, copies, strict=True):
        penalise(copy, numbers, numbers * 3, numbers, **factors, backend=each)
    _near(*copies, 1e-5)
    return (
        "the reference's ids" if torch.equal(got, want) else "all ids but one are the reference's"
    )


def _engine(family: str, device: torch.device, is_small: bool) -> str:
    """Greedy answers of unlike prompts in one batch, chunked, against transformers, id by id."""
    prompts, num_tokens = _prompts(is_small)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "tiny"
        oracle = save_tiny_model(family, folder, **_layers(is_small))
        answers, backend = _answers(folder, device, prompts, num_tokens)
    for answer, prompt in zip(answers, prompts, strict=True):
        want = greedy_of_transformers(oracle, prompt, num_tokens)
        assert answer == want, f"{answer}, not {want}"
    return f"{len(prompts)} x {num_tokens} ids, {backend}"


def _engine_in_8_bits(device: torch.device, is_small: bool) -> str:
    """The same with keys and values in 8 bits, against the references on the CPU."""
    prompts, num_tokens = _prompts(is_small)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "tiny"
        save_tiny_model("llama", folder, **_layers(is_small))
        got, backend = _answers(folder, device, prompts, num_tokens, kv_dtype="int8")
        cpu = torch.device("cpu")
        want, _ = _answers(folder, cpu, prompts, num_tokens, kv_dtype="int8")
    assert got == want, f"{got}, not {want}"
    return f"{len(prompts)} x {num_tokens} ids, {backend}"


def _engine_with_groups(device: torch.device, is_small: bool) -> str:
    """Log probabilities along one forced text, against the same weights in fp32 on the CPU."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "tiny"
        save_tiny_model("llama", folder, **(shape | _layers(is_small)))
        write_groups(folder)
        forced = {"logit_bias": {17: 100.0}, "logprobs": 1}
        told = []
        for where, dtype in ((device, "bfloat16"), (torch.device("cpu"), "float32")):
            runner = _runner(folder, where, dtype=dtype)
            info = runner.load(lambda share, text: None)
            driver = StepDriver(runner.execute, num_blocks=info.num_blocks, block_size=8)
            request = make_request([5, 9, 40], **forced)
            steps = [driver.step([request], 24) for _ in range(3 if is_small else 20)]
            told.append([step.tokens["request"].logprobs.token_logprob for step in steps])
            runner.close()
            if where.type == "cuda":
                assert "quantised" in info.backend, info.backend
    # These random models magnify roundings; a wrong weight is nats off.
    worst = max(abs(got - want) for got, want in zip(*told, strict=True))
    assert worst < 0.5, f"{worst:.2f} nats off"
    return f"at most {worst:.2f} nats off"


def _prompts(is_small: bool) -> tuple[list[list[int]], int]:
    """Prompts, and how many tokens to answer each with."""
    if is_small:
        return [[5, 9, 40], [7] * 9], 3
    return [[5, 9, 40], [7] * 30, list(range(3, 60)), [2, 2], [90, 8]], 20


def _layers(is_small: bool) -> dict[str, int]:
    return {"num_hidden_layers": 1} if is_small else {}


def _answers(
    folder: Path,
    device: torch.device,
    prompts: list[list[int]],
    num_tokens: int,
    **settings: str,
) -> tuple[list[list[int]], str]:
    """Greedy ids of each prompt, all in one batch in fp32; and the backend's name."""
    runner = _runner(folder, device, dtype="float32", **settings)
    info = runner.load(lambda share, text: None)
    driver = StepDriver(runner.execute, num_blocks=info.num_blocks, block_size=8)
    requests = [make_request(prompt, str(row)) for row, prompt in enumerate(prompts)]
    driver.run(requests, num_tokens, budget=24)
    runner.close()
    return [request.output_token_ids for request in requests], info.backend


def _runner(folder: Path, device: torch.device, **settings: str) -> ModelRunner:
    return ModelRunner(
        EngineConfig(
            model_dir=folder,
            device=device.type,
            cpu_backend="torch",
            num_blocks=60,
            block_size=8,
            **settings,
        )
    )
