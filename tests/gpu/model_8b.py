"""Linears and whole decode steps of a random model of 8 billion weights, of Llama's shape."""

import functools

import torch

from inference.config import ModelConfig
from inference.kv_cache.storage import KVCacheStorage
from inference.layers.linear import Linear
from inference.models.decoder import Decoder
from inference.models.spec import DecoderSpec, LayerSpec, RopeSpec
from inference.runner.cuda_graphs import CudaGraphs, GraphedForward
from inference.runner.input_batch import InputBatch
from kernels.quant_linear import quant_linear
from kernels.quant_linear.packing import GROUP, QuantWeight, pack
from tests.gpu.clock import seconds
from tests.gpu.report import Report

BF16 = torch.bfloat16
BLOCK_SIZE = 16
BATCHES = (1, 16, 64)
CONTEXT = 1024
_BLOCKS_EACH = CONTEXT // BLOCK_SIZE


def measure_linears(report: Report, rates: dict[str, float], device: torch.device) -> None:
    """A layer's four, from weights in 4 and 8 bits, as shares of the copy bandwidth."""
    for bits in (4, 8):
        for num_rows in BATCHES:
            report.measure(
                f"8B shape: a layer's linears, {bits} bits, {num_rows} rows",
                functools.partial(_quant_linears, bits, num_rows, rates, device),
            )


def measure_steps(report: Report, rates: dict[str, float], device: torch.device) -> None:
    """Decode steps, logits included: in bf16, then with 4-bit weights and keys in 8 bits."""
    steps = _Steps(rates, device)
    for name, in_few_bits in (("bf16", False), ("4-bit weights, 8-bit KV", True)):
        build = functools.partial(steps.build, in_few_bits=in_few_bits)
        report.measure(f"8B shape, {name}: graphs made", build)
        for batch in BATCHES:
            report.measure(
                f"8B shape, {name}: decode step, {batch} x {CONTEXT}",
                functools.partial(steps.measure, batch),
            )


class _Steps:
    def __init__(self, rates: dict[str, float], device: torch.device) -> None:
        self._rates = rates
        self._device = device
        self._decoder: Decoder | None = None
        self._forward: GraphedForward | None = None
        # What a step reads: weights, and a request's keys and values.
        self._weight_bytes = self._kv_bytes = 0

    @torch.inference_mode()
    def build(self, *, in_few_bits: bool) -> str:
        self._forward = None  # its graphs' memory first
        if self._decoder is None:
            self._decoder = Decoder(spec(), max_positions=4096, dtype=BF16, device=self._device)
            for parameter in self._decoder.parameters():
                parameter.normal_(std=0.02)
        linears = [each for each in self._decoder.modules() if isinstance(each, Linear)]
        if in_few_bits:
            for linear in linears:
                num_columns, depth = linear.weight.shape
                linear.groups = (_random_groups(num_columns, depth, 4, self._device),)
        # A step reads a row of the embedding for each token, not all of it; norms are small.
        self._weight_bytes = sum(
            part.nbytes for each in linears for part in each.groups or (each.weight,)
        )
        storage = KVCacheStorage(
            _config(),
            num_blocks=max(BATCHES) * _BLOCKS_EACH,
            block_size=BLOCK_SIZE,
            dtype=torch.int8 if in_few_bits else BF16,
            device=self._device,
        )
        scales = 0 if storage.key_scales is None else storage.key_scales.nbytes
        self._kv_bytes = 2 * (storage.key_cache.nbytes + scales) // max(BATCHES)
        self._forward = GraphedForward(
            self._decoder,
            storage,
            max_requests=max(BATCHES),
            max_blocks=_BLOCKS_EACH,
            capture=CudaGraphs(),
        )
        return f"{self._weight_bytes / 1e9:.1f} GB of weights are read"

    @torch.inference_mode()
    def measure(self, batch: int) -> str:
        forward = self._forward
        assert forward is not None, "the graphs could not be made"
        given = _decode_batch(batch, self._device)
        took = seconds(lambda: forward.forward(given))
        floor = (self._weight_bytes + batch * self._kv_bytes) / self._rates["copy"]
        return (
            f"{took * 1e3:.2f} ms, {batch / took:,.0f} tokens/s, "
            f"{took / floor:.2f} of its floor (goal 1.3)"
        )


def _decode_batch(batch: int, device: torch.device) -> InputBatch:
    tables = torch.randperm(batch * _BLOCKS_EACH, device=device).int().view(batch, _BLOCKS_EACH)
    last = tables[:, -1].long() * BLOCK_SIZE + BLOCK_SIZE - 1
    return InputBatch(
        input_ids=torch.arange(batch, device=device),
        positions=torch.full((batch,), CONTEXT - 1, device=device),
        slot_mapping=last,
        block_tables=tables,
        seq_lens=torch.full((batch,), CONTEXT, dtype=torch.int32, device=device),
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32, device=device),
        logits_indices=torch.arange(batch, device=device),
        num_tokens=batch,
        num_requests=batch,
        num_decodes=batch,
        max_query_len=1,
        max_seq_len=CONTEXT,
    )


def _quant_linears(bits: int, num_rows: int, rates: dict[str, float], device: torch.device) -> str:
    """A layer's four linears, one after the other, with mins in 4 bits (Q4_1) and none in 8."""
    shape = spec()
    hidden, inner = shape.hidden_size, shape.intermediate_size
    heads = shape.head_dim * (shape.num_heads + 2 * shape.num_kv_heads)
    shapes = ((heads, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner))
    calls = []
    num_bytes = 0
    for num_columns, depth in shapes:
        weight = _random_groups(num_columns, depth, bits, device)
        num_bytes += weight.nbytes
        inputs = torch.randn(num_rows, depth, dtype=BF16, device=device)
        calls.append(functools.partial(quant_linear, inputs, weight))

    def call_all() -> torch.Tensor:
        return [call() for call in calls][-1]

    took = seconds(CudaGraphs()(call_all))
    return f"{num_bytes / took / rates['copy']:.0%} of copy bandwidth, {took * 1e6:.0f} us"


def _random_groups(num_columns: int, depth: int, bits: int, device: torch.device) -> QuantWeight:
    quants = torch.randint(
        0, 256, (num_columns, depth * bits // 8), dtype=torch.uint8, device=device
    )
    scales = (torch.rand(num_columns, depth // GROUP, device=device) / (40 * 2**bits)).half()
    return pack(quants, scales, -8 * scales if bits == 4 else None)


def spec() -> DecoderSpec:
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


def _config() -> ModelConfig:
    shape = spec()
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=len(shape.layers),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position=8192,
        rms_norm_eps=shape.norm_eps,
        rope_theta=500_000.0,
        tie_word_embeddings=False,
        eos_token_ids=(),
        bos_token_id=None,
    )
