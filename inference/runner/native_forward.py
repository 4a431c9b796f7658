"""The forward pass as one compiled call a step: all layers, the GIL released.

For decoders of Llama's shape on a CPU, with keys and values in bfloat16 or in 8 bits. Few rows
multiply with the checkpoint's own quantised groups, where `quantized.safetensors` has them; many
rows with the same groups, or with bfloat16 weights, whichever the processor's kernels do best.

NOTE: everything here runs on the engine thread, loading too. OpenMP keeps a pool of threads for
each thread that starts parallel work; a second pool on the same cores halves the speed.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inference.config import EngineConfig, ModelConfig
from inference.errors import MissingWeights
from inference.kv_cache.storage import KVCacheStorage
from inference.layers.rotary import RotaryTable
from inference.models.registry import decoder_spec
from inference.models.spec import PRE_NORMS, DecoderSpec
from inference.runner.forward import ForwardUnavailable
from inference.runner.input_batch import InputBatch
from inference.weights.groups_file import GroupsFile, StoredBlocks
from inference.weights.loader import Checkpoint
from inference.weights.names import checkpoint_names
from kernels.native import library

logger = logging.getLogger(__name__)

MAX_HEAD_DIM = 256

Progress = Callable[[float, str], None]


class NativeForward:
    """See `inference.runner.forward.Forward`."""

    def __init__(self, model: Any, name: str, *, quantised: bool) -> None:
        self._model = model
        self._name = name
        # Whether any linear reads quantised groups.
        self.quantised = quantised

    @property
    def name(self) -> str:
        return self._name

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    def on_storage_moved(self) -> None:
        """A storage of the CPU changes its size where it lies."""

    def forward(self, batch: InputBatch) -> Tensor:
        logits: Tensor = self._model.forward(
            batch.input_ids,
            batch.positions,
            batch.slot_mapping,
            batch.block_tables,
            batch.seq_lens,
            batch.query_start_loc,
            batch.logits_indices,
        )
        return logits


def make_native_forward(
    config: EngineConfig,
    model_config: ModelConfig,
    model_dir: Path,
    storage: KVCacheStorage,
    on_progress: Progress,
    *,
    kernels: str | None = None,
    use_groups: bool = True,
) -> NativeForward:
    """Load, pack and return the compiled forward pass.

    Args:
        kernels: an id of `library.usable_kernels()`; None takes the best.
        use_groups: False ignores quantised groups, as if the folder had none.

    Raises:
        ForwardUnavailable: this model, setting or machine cannot be served so; the reason is plain.
        ModelLoadError: the weights cannot be read.
    """
    spec = decoder_spec(model_config)
    reason = _unsupported(config, spec, storage, config.max_model_len or model_config.max_position)
    if reason:
        raise ForwardUnavailable(reason)
    on_progress(0.0, "preparing the CPU kernels")
    try:
        library.load()
    except library.NativeUnavailable as exc:
        raise ForwardUnavailable(str(exc)) from exc
    usable = library.usable_kernels()
    chosen = kernels or usable[0]
    if chosen not in usable:
        raise ForwardUnavailable(f"this processor cannot run the {chosen} kernels")
    loader = _Loader(spec, chosen, model_dir, on_progress, use_groups=use_groups)
    model = loader.build(storage, config.max_model_len or model_config.max_position)
    library.take_threads(own=not loader.calls_torch)
    title = library.kernels_title(chosen)
    logger.info(
        "Native forward pass with %s kernels; %d of %d linears have quantised groups.",
        title,
        loader.num_grouped,
        loader.num_linears,
    )
    return NativeForward(model, f"native {title}", quantised=loader.num_grouped > 0)


def _unsupported(
    config: EngineConfig, spec: DecoderSpec, storage: KVCacheStorage, max_positions: int
) -> str | None:
    if config.dtype not in ("auto", "bfloat16"):
        return f"the compiled CPU step works in bfloat16, and the engine is set to {config.dtype}"
    if storage.device.type != "cpu" or storage.dtype not in (torch.bfloat16, torch.int8):
        return "the compiled CPU step keeps keys and values in bfloat16 or int8 on the CPU"
    if spec.head_dim % 8 or spec.head_dim > MAX_HEAD_DIM:
        return f"its heads have {spec.head_dim} dimensions; multiples of 8 up to 256 are covered"
    for layer in spec.layers:
        if layer.sliding_window is not None and layer.sliding_window < max_positions:
            return "the compiled CPU step has no sliding window"
    plain = DecoderSpec(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        layers=spec.layers,
        ropes=spec.ropes,
        norm_eps=spec.norm_eps,
        tie_word_embeddings=spec.tie_word_embeddings,
        attention_scale=spec.attention_scale,
        qkv_bias=spec.qkv_bias,
        norm_offset=spec.norm_offset,
        qk_norm="head" if spec.qk_norm == "head" else "none",
        norms=PRE_NORMS,
    )
    has_one_rope = all(layer.rope == 0 for layer in spec.layers) and (
        spec.ropes[0].rotary_dim == spec.head_dim
    )
    if spec != plain or not has_one_rope:
        return "the compiled CPU step covers models of Llama's shape, and this one differs from it"
    return None


def _add_groups(file: GroupsFile, linear: Any, weights: Sequence[str]) -> bool:
    """Put the groups of the checkpoint's `weights`, stacked, into a linear; False, and none,
    unless the file has all of them in forms that the kernels cover."""
    parts = file.read(weights)
    return bool(parts) and all(
        linear.add_super_blocks(part.blocks, part.bits)
        if isinstance(part, StoredBlocks)
        else linear.add_groups(part.quants, part.scales, part.mins)
        for part in parts
    )


class _Loader:
    """Reads a checkpoint layer by layer into a NativeModel."""

    def __init__(
        self,
        spec: DecoderSpec,
        kernels: str,
        model_dir: Path,
        on_progress: Progress,
        *,
        use_groups: bool,
    ) -> None:
        self.num_linears = 0
        self.num_grouped = 0
        # Whether some linear multiplies in torch, on torch's threads.
        self.calls_torch = False
        self._spec = spec
        self._kernels = kernels
        self._checkpoint = Checkpoint(model_dir)
        self._groups = GroupsFile(model_dir) if use_groups else None
        self._on_progress = on_progress

    def build(self, storage: KVCacheStorage, max_positions: int) -> Any:
        spec = self._spec
        embedding = self._read("embedding.weight", spec.vocab_size, spec.hidden_size)
        head = "embedding.weight" if spec.tie_word_embeddings else "lm_head.weight"
        table = RotaryTable(spec.ropes[0], max_positions, torch.device("cpu"))
        model = library.new_model(
            self._kernels,
            spec.num_heads,
            spec.norm_eps,
            spec.attention_scale,
            embedding,
            self._norm("norm.weight", spec.hidden_size),
            table.cos_sin,
            self._linear(head, spec.vocab_size, spec.hidden_size),
            storage.key_cache,
            storage.value_cache,
            storage.key_scales,
            storage.value_scales,
        )
        for index in range(len(spec.layers)):
            self._add_layer(model, f"layers.{index}")
            self._on_progress((index + 1) / len(spec.layers), "reading weights")
        return model

    def _add_layer(self, model: Any, prefix: str) -> None:
        spec = self._spec
        queries, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        hidden, inner = spec.hidden_size, spec.intermediate_size
        bias = query_norm = key_norm = None
        if spec.qkv_bias:
            bias = self._read(f"{prefix}.attention.qkv_proj.bias", queries + 2 * kv)
        if spec.qk_norm == "head":
            query_norm = self._norm(f"{prefix}.attention.q_norm.weight", spec.head_dim)
            key_norm = self._norm(f"{prefix}.attention.k_norm.weight", spec.head_dim)
        model.add_layer(
            self._norm(f"{prefix}.attention_norm.weight", hidden),
            self._norm(f"{prefix}.mlp_norm.weight", hidden),
            self._linear(f"{prefix}.attention.qkv_proj.weight", queries + 2 * kv, hidden),
            self._linear(f"{prefix}.attention.o_proj.weight", hidden, queries),
            self._linear(f"{prefix}.mlp.gate_up_proj.weight", 2 * inner, hidden),
            self._linear(f"{prefix}.mlp.down_proj.weight", hidden, inner),
            bias,
            query_norm,
            key_norm,
        )

    def _names(self, parameter: str) -> tuple[str, ...]:
        stacked = checkpoint_names(self._spec, parameter, stacked=True)
        if all(name in self._checkpoint for name in stacked):
            return stacked
        return checkpoint_names(self._spec, parameter, stacked=False)

    def _read(self, parameter: str, *shape: int) -> Tensor:
        names = self._names(parameter)
        absent = [name for name in names if name not in self._checkpoint]
        if absent:
            raise MissingWeights(
                f"{self._checkpoint.model_dir} cannot be loaded. Missing tensors: "
                f"{', '.join(absent)}."
            )
        found = torch.cat([self._checkpoint.read(name) for name in names])
        if tuple(found.shape) != shape:
            raise MissingWeights(
                f"{self._checkpoint.model_dir} cannot be loaded. Tensors of a wrong shape: "
                f"{', '.join(names)} {list(found.shape)} instead of {list(shape)}."
            )
        return found

    def _norm(self, parameter: str, size: int) -> Tensor:
        return self._read(parameter, size).float() + self._spec.norm_offset

    def _linear(self, parameter: str, num_columns: int, depth: int) -> Any:
        linear = library.new_linear(self._kernels, num_columns, depth)
        self.num_linears += 1
        if self._groups and _add_groups(self._groups, linear, self._names(parameter)):
            self.num_grouped += 1
        if not linear.groups_suffice():
            linear.set_dense(self._read(parameter, num_columns, depth))
        self.calls_torch |= linear.calls_torch()
        return linear
