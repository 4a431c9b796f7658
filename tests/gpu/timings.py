"""Speeds as shares of what this very device reaches at copying and multiplying."""

import torch

from inference.runner.cuda_graphs import CudaGraphs
from kernels.paged_attention import paged_attention
from tests.gpu.clock import seconds
from tests.gpu.model_8b import measure_linears, measure_steps
from tests.gpu.report import Report

BF16 = torch.bfloat16
BLOCK_SIZE = 16


def measure_all(report: Report) -> None:
    device = torch.device("cuda")
    rates: dict[str, float] = {}
    report.measure("copy bandwidth", lambda: _copy(rates))
    report.measure("bf16 matrix products", lambda: _matmul(rates))
    for batch, context in ((1, 32_768), (16, 4096), (64, 4096), (64, 1024)):
        report.measure(
            f"decode attention, {batch} x {context}",
            lambda b=batch, c=context: _decode(b, c, rates, device),
        )
    report.measure(
        "decode attention over 8 bits, 64 x 4096",
        lambda: _decode(64, 4096, rates, device, in_8_bits=True),
    )
    for batch, length in ((1, 8192), (4, 2048)):
        report.measure(
            f"prefill attention, {batch} x {length}",
            lambda b=batch, c=length: _prefill(b, c, rates, device),
        )
    measure_linears(report, rates, device)
    measure_steps(report, rates, device)


def _copy(rates: dict[str, float]) -> str:
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    rates["copy"] = 2 * source.nbytes / seconds(lambda: target.copy_(source))
    return f"{rates['copy'] / 1e12:.2f} TB/s"


def _matmul(rates: dict[str, float]) -> str:
    left, right = (torch.randn(8192, 8192, dtype=BF16, device="cuda") for _ in range(2))
    rates["matmul"] = 2 * 8192**3 / seconds(lambda: left @ right)
    return f"{rates['matmul'] / 1e12:.0f} TFLOP/s"


def _paged(
    batch: int, context: int, new: int, device: torch.device, *, in_8_bits: bool = False
) -> dict[str, torch.Tensor]:
    """32 query heads over 8 of 128 dimensions; blocks in random order."""
    blocks = -(-context // BLOCK_SIZE)
    shape = (2, batch * blocks, BLOCK_SIZE, 8, 128)
    scales = {}
    if in_8_bits:
        cache = torch.randint(-127, 128, shape, dtype=torch.int8, device=device)
        ones = torch.rand(shape[:-1], device=device) / 40
        scales = {"key_scales": ones[0], "value_scales": ones[1]}
    else:
        cache = torch.randn(shape, dtype=BF16, device=device)
    tables = torch.randperm(batch * blocks, device=device).int().view(batch, blocks)
    return {
        "query": torch.randn(batch * new, 32, 128, dtype=BF16, device=device),
        "key_cache": cache[0],
        "value_cache": cache[1],
        "block_tables": tables,
        "seq_lens": torch.full((batch,), context, dtype=torch.int32, device=device),
        "query_start_loc": torch.arange(batch + 1, dtype=torch.int32, device=device) * new,
        **scales,
    }


def _decode(
    batch: int,
    context: int,
    rates: dict[str, float],
    device: torch.device,
    *,
    in_8_bits: bool = False,
) -> str:
    given = _paged(batch, context, 1, device, in_8_bits=in_8_bits)
    # In a graph, as the engine runs it: else two launches are most of a short context's time.
    replay = CudaGraphs()(lambda: paged_attention(**given, scale=0.088, num_decodes=batch))
    read = ("key_cache", "value_cache", "key_scales", "value_scales")
    num_bytes = sum(given[name].nbytes for name in read if name in given)
    share = num_bytes / seconds(replay) / rates["copy"]
    return f"{share:.0%} of copy bandwidth (goal 85 %)"


def _prefill(batch: int, length: int, rates: dict[str, float], device: torch.device) -> str:
    given = _paged(batch, length, length, device)
    took = seconds(lambda: paged_attention(**given, scale=0.088, num_decodes=0))
    # Two products of 2 operations for each visible pair of tokens.
    work = batch * 32 * 128 * 4 * length * (length + 1) / 2
    return f"{work / took / rates['matmul']:.0%} of the matrix rate (goal 60 %)"
