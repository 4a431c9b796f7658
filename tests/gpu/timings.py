"""Speeds as shares of what this very device reaches at copying and multiplying."""

import statistics
from collections.abc import Callable

import torch

from inference.config import ModelConfig
from inference.kv_cache.storage import KVCacheStorage
from inference.models.decoder import Decoder
from inference.models.spec import DecoderSpec, LayerSpec, RopeSpec
from inference.runner.cuda_graphs import CudaGraphs, GraphedForward
from inference.runner.input_batch import InputBatch
from kernels.paged_attention import paged_attention
from tests.gpu.report import Report

BF16 = torch.bfloat16
BLOCK_SIZE = 16


def seconds(call: Callable[[], object], repeats: int = 10) -> float:
    """Median time on the device; each time after 256 MB were written, so that no cache helps."""
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)


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
    for batch, length in ((1, 8192), (4, 2048)):
        report.measure(
            f"prefill attention, {batch} x {length}",
            lambda b=batch, c=length: _prefill(b, c, rates, device),
        )
    _steps(report, rates, device)


def _copy(rates: dict[str, float]) -> str:
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    rates["copy"] = 2 * source.nbytes / seconds(lambda: target.copy_(source))
    return f"{rates['copy'] / 1e12:.2f} TB/s"


def _matmul(rates: dict[str, float]) -> str:
    left, right = (torch.randn(8192, 8192, dtype=BF16, device="cuda") for _ in range(2))
    rates["matmul"] = 2 * 8192**3 / seconds(lambda: left @ right)
    return f"{rates['matmul'] / 1e12:.0f} TFLOP/s"


def _paged(batch: int, context: int, new: int, device: torch.device) -> dict[str, torch.Tensor]:
    """32 query heads over 8 of 128 dimensions; blocks in random order."""
    blocks = -(-context // BLOCK_SIZE)
    cache = torch.randn(2, batch * blocks, BLOCK_SIZE, 8, 128, dtype=BF16, device=device)
    tables = torch.randperm(batch * blocks, device=device).int().view(batch, blocks)
    return {
        "query": torch.randn(batch * new, 32, 128, dtype=BF16, device=device),
        "key_cache": cache[0],
        "value_cache": cache[1],
        "block_tables": tables,
        "seq_lens": torch.full((batch,), context, dtype=torch.int32, device=device),
        "query_start_loc": torch.arange(batch + 1, dtype=torch.int32, device=device) * new,
    }


def _decode(batch: int, context: int, rates: dict[str, float], device: torch.device) -> str:
    given = _paged(batch, context, 1, device)
    # In a graph, as the engine runs it: else two launches are most of a short context's time.
    replay = CudaGraphs()(lambda: paged_attention(**given, scale=0.088, num_decodes=batch))
    share = 2 * given["key_cache"].nbytes / seconds(replay) / rates["copy"]
    return f"{share:.0%} of copy bandwidth (goal 85 %)"


def _prefill(batch: int, length: int, rates: dict[str, float], device: torch.device) -> str:
    given = _paged(batch, length, length, device)
    took = seconds(lambda: paged_attention(**given, scale=0.088, num_decodes=0))
    # Two products of 2 operations for each visible pair of tokens.
    work = batch * 32 * 128 * 4 * length * (length + 1) / 2
    return f"{work / took / rates['matmul']:.0%} of the matrix rate (goal 60 %)"


def _steps(report: Report, rates: dict[str, float], device: torch.device) -> None:
    """Whole decode steps, logits included, of a random model of 8 billion weights."""
    context, blocks = 1024, 1024 // BLOCK_SIZE
    made: dict[str, GraphedForward] = {}
    num_bytes: dict[str, int] = {}

    def build() -> str:
        with torch.inference_mode():
            decoder = Decoder(_spec_8b(), max_positions=4096, dtype=BF16, device=device)
            for parameter in decoder.parameters():
                parameter.normal_(std=0.02)
            config = _config_8b()
            storage = KVCacheStorage(
                config, num_blocks=64 * blocks, block_size=BLOCK_SIZE, dtype=BF16, device=device
            )
            # A step reads a row of the embedding for each token, not all of it.
            read = [p for name, p in decoder.named_parameters() if "embedding" not in name]
            num_bytes["weights"] = sum(parameter.nbytes for parameter in read)
            num_bytes["kv"] = storage.key_cache.nbytes * 2 // storage.num_blocks * blocks
            made["forward"] = GraphedForward(
                decoder, storage, max_requests=64, max_blocks=blocks, capture=CudaGraphs()
            )
        return f"{num_bytes['weights'] / 1e9:.1f} GB of weights"

    report.measure("8B shape: weights and graphs made", build)
    for batch in (1, 16, 64):

        def step(batch: int = batch) -> str:
            with torch.inference_mode():
                given = _decode_batch(batch, context, blocks, device)
                took = seconds(lambda: made["forward"].forward(given))
            floor = (num_bytes["weights"] + batch * num_bytes["kv"]) / rates["copy"]
            return (
                f"{took * 1e3:.2f} ms, {batch / took:,.0f} tokens/s, "
                f"{took / floor:.2f} of its floor (goal 1.3)"
            )

        report.measure(f"8B shape: decode step, {batch} x {context}", step)


def _decode_batch(batch: int, context: int, blocks: int, device: torch.device) -> InputBatch:
    tables = torch.randperm(batch * blocks, device=device).int().view(batch, blocks)
    last = tables[:, -1].long() * BLOCK_SIZE + BLOCK_SIZE - 1
    return InputBatch(
        input_ids=torch.arange(batch, device=device),
        positions=torch.full((batch,), context - 1, device=device),
        slot_mapping=last,
        block_tables=tables,
        seq_lens=torch.full((batch,), context, dtype=torch.int32, device=device),
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32, device=device),
        logits_indices=torch.arange(batch, device=device),
        num_tokens=batch,
        num_requests=batch,
        num_decodes=batch,
        max_query_len=1,
        max_seq_len=context,
    )


def _spec_8b() -> DecoderSpec:
    return DecoderSpec(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        layers=(LayerSpec(),) * 32,
        ropes=(RopeSpec(theta=500_000.0, rotary_dim=128, max_position=8192),),
        norm_eps=1e-5,
        tie_word_embeddings=False,
        attention_scale=128**-0.5,
    )


def _config_8b() -> ModelConfig:
    spec = _spec_8b()
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_layers=len(spec.layers),
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position=8192,
        rms_norm_eps=spec.norm_eps,
        rope_theta=500_000.0,
        tie_word_embeddings=False,
        eos_token_ids=(),
        bos_token_id=None,
    )
