"""Loads a model and computes steps. Everything here runs on the engine thread, loading too: the
thread that first runs parallel torch work owns the worker threads, and a second owner slows both.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from inference.config import EngineConfig, ModelConfig
from inference.errors import NotEnoughMemory
from inference.kv_cache.storage import (
    KVCacheStorage,
    bytes_per_block,
    choose_num_blocks,
    free_memory,
)
from inference.models.decoder import Decoder
from inference.models.registry import decoder_spec, refuse_quantised
from inference.models.spec import DecoderSpec
from inference.outputs import (
    RunnerInfo,
    ScheduledRequest,
    SchedulerOutput,
    StepOutput,
    TokenOutput,
)
from inference.request import Request
from inference.runner.choices import (
    choose_device,
    choose_dtype,
    choose_max_model_len,
    device_name,
)
from inference.runner.cuda_graphs import MAX_GRAPH_REQUESTS, CudaGraphs, GraphedForward
from inference.runner.decodes_ahead import NUM_SPARE_BLOCKS, DecodesAhead
from inference.runner.forward import Forward, ForwardUnavailable, TorchForward
from inference.runner.input_batch import build_input_batch
from inference.runner.native_forward import make_native_forward
from inference.runner.profiling import activation_bytes
from inference.sampler import Sampler
from inference.sampling_params import SamplingParams
from inference.scheduling.speculation import accept_draft
from inference.weights.groups import add_groups, memory_of
from inference.weights.groups_file import GroupsFile
from inference.weights.loader import Checkpoint, check_model_dir, load_weights
from inference.weights.token_ids import num_token_ids, tokenizer_eos_id
from kernels.backends import has_triton

logger = logging.getLogger(__name__)

Progress = Callable[[float, str], None]

# A step of this many tokens takes about a tenth of a second on two cores.
_CPU_BATCHED_TOKENS = 256
_CUDA_BATCHED_TOKENS = 2048
# What a live change of the pool's memory goes up to.
_MOST_KV_SHARE = 0.95


@dataclass(slots=True)
class _Loaded:
    forward: Forward
    storage: KVCacheStorage
    sampler: Sampler
    # Where the device computes while the host does something else.
    ahead: DecodesAhead | None = None


class ModelRunner:
    """Implements the `Runner` protocol. See `inference.outputs.Runner`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._loaded: _Loaded | None = None
        # Memory that the weights leave, measured when the storage is made.
        self._kv_budget_bytes = 0

    @torch.inference_mode()
    def load(self, on_progress: Progress) -> RunnerInfo:
        """See `Runner.load`.

        Raises:
            ModelLoadError: nothing half-loaded is left behind.
            InvalidConfig: a setting is out of its range.
        """
        config = self._config
        config.validate()
        on_progress(0.0, "reading the model's configuration")
        torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
        check_model_dir(config.model_dir)
        model_config = ModelConfig.from_dir(config.model_dir)
        spec = decoder_spec(model_config)
        refuse_quantised(model_config)
        device = choose_device(config.device)
        max_model_len = choose_max_model_len(config, model_config, spec)
        try:
            forward, storage, notice = self._make_forward(
                model_config, spec, max_model_len, device, on_progress
            )
        except torch.OutOfMemoryError as exc:
            raise NotEnoughMemory(f"The model does not fit the memory of {device}: {exc}") from exc
        vocab_size = min(num_token_ids(config.model_dir) or spec.vocab_size, spec.vocab_size)
        eos_token_ids = self._eos_token_ids(model_config)
        self._loaded = _Loaded(forward, storage, Sampler(vocab_size, eos_token_ids))
        if isinstance(forward, GraphedForward):
            self._loaded.ahead = DecodesAhead(
                forward, storage, most_requests=forward.most_requests, max_len=max_model_len
            )
        self._warm_up(min(config.block_size, max_model_len))
        on_progress(1.0, "ready")
        return RunnerInfo(
            model_name=config.model_dir.name,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            num_blocks=storage.num_blocks,
            block_size=storage.block_size,
            bytes_per_block=bytes_per_block(model_config, storage.block_size, storage.dtype),
            kv_budget_bytes=self._kv_budget_bytes,
            default_max_num_batched_tokens=(
                _CPU_BATCHED_TOKENS if device.type == "cpu" else _CUDA_BATCHED_TOKENS
            ),
            device=device_name(device),
            dtype=str(forward.dtype).removeprefix("torch."),
            backend=forward.name,
            kv_dtype=str(storage.dtype).removeprefix("torch."),
            notice=notice,
        )

    @torch.inference_mode()
    def execute(self, scheduler_output: SchedulerOutput) -> StepOutput:
        """See `Runner.execute`."""
        loaded = self._loaded
        assert loaded is not None, "execute() before load()"
        started = time.monotonic()
        loaded.sampler.forget(scheduler_output.finished_request_ids)
        loaded.storage.copy_blocks(scheduler_output.block_copies)
        scheduled = scheduler_output.scheduled
        if not scheduled:
            return StepOutput(tokens={}, host_s=time.monotonic() - started)
        taken = loaded.ahead.take(scheduler_output) if loaded.ahead is not None else None
        rest = scheduler_output if taken is None else taken.rest
        storage = loaded.storage
        batch = logits = None
        if rest.scheduled:
            batch = build_input_batch(rest, storage.block_size, storage.device)
        prepared = time.monotonic()
        if batch is not None:
            logits = loaded.forward.forward(batch)
        if taken is not None:
            logits = taken.join(logits)
        assert logits is not None, "a step computes something"
        sampling = [part for part in scheduled if part.samples]
        outputs = iter(self._sample(logits, scheduler_output, sampling))
        tokens, accepted = {}, {}
        for part in sampling:
            sampled = list(islice(outputs, 1 + len(part.draft_token_ids)))
            num_accepted, token = accept_draft(part.draft_token_ids, sampled)
            tokens[part.request.request_id] = token
            if num_accepted:
                accepted[part.request.request_id] = num_accepted
        return StepOutput(
            tokens=tokens,
            num_accepted=accepted,
            forward_s=time.monotonic() - prepared,
            host_s=prepared - started,
        )

    def _sample(
        self, logits: Tensor, step: SchedulerOutput, sampling: Sequence[ScheduledRequest]
    ) -> list[TokenOutput]:
        """A token for each row of `logits`: of each of `sampling`, and after each of its drafts."""
        loaded = self._loaded
        assert loaded is not None
        rows = [part.request for part in sampling for _ in range(1 + len(part.draft_token_ids))]
        if not rows:
            return []
        if loaded.ahead is None:
            return loaded.sampler.sample(logits, rows)
        loaded.ahead.plan(step)
        return loaded.sampler.sample(logits, rows, loaded.ahead.start)

    @torch.inference_mode()
    def move_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Runner.move_blocks`."""
        assert self._loaded is not None, "move_blocks() before load()"
        if self._loaded.ahead is not None:
            self._loaded.ahead.drop()
        self._loaded.storage.copy_blocks(list(pairs))

    @torch.inference_mode()
    def resize_kv(self, num_blocks: int) -> None:
        """See `Runner.resize_kv`."""
        assert self._loaded is not None, "resize_kv() before load()"
        if self._loaded.ahead is not None:
            self._loaded.ahead.drop()
        if self._loaded.storage.resize(num_blocks):
            self._loaded.forward.on_storage_moved()

    def close(self) -> None:
        """See `Runner.close`."""
        if self._loaded is None:
            return
        on_cuda = self._loaded.storage.device.type == "cuda"
        if on_cuda:
            # A step computed ahead may still run.
            torch.cuda.synchronize()
        self._loaded = None
        if on_cuda:
            torch.cuda.empty_cache()

    def _make_forward(
        self,
        model_config: ModelConfig,
        spec: DecoderSpec,
        max_model_len: int,
        device: torch.device,
        on_progress: Progress,
    ) -> tuple[Forward, KVCacheStorage, str]:
        """The forward pass, its storage, and a notice when a faster one was wanted."""
        config = self._config
        checkpoint = Checkpoint(config.model_dir)
        wants_native = config.cpu_backend == "native" and config.dtype in ("auto", "bfloat16")
        notice = ""
        if device.type == "cpu" and wants_native:
            weight_bytes = checkpoint.num_elements * torch.bfloat16.itemsize
            storage = self._make_storage(
                model_config, max_model_len, torch.bfloat16, device, weight_bytes
            )
            try:
                forward = make_native_forward(
                    config,
                    model_config,
                    config.model_dir,
                    storage,
                    on_progress,
                    kernels=config.cpu_kernels,
                    use_groups=config.use_groups,
                )
                return forward, storage, notice
            except ForwardUnavailable as exc:
                reason = str(exc).rstrip(".")
                notice = f"The compiled CPU step is not in use: {reason}."
                logger.warning("%s", notice)
                del storage
        dtype = choose_dtype(config.dtype, device)
        # Groups multiply with 16 bits, in a kernel of the GPU's.
        reads_groups = config.use_groups and device.type == "cuda" and has_triton()
        decoder = load_decoder(
            spec,
            checkpoint,
            GroupsFile(config.model_dir) if reads_groups and dtype != torch.float32 else None,
            max_positions=max_model_len,
            dtype=dtype,
            device=device,
            on_progress=on_progress,
        )
        if device.type != "cuda":
            storage = self._make_storage(model_config, max_model_len, dtype, device, 0)
            return TorchForward(decoder, storage), storage, notice
        on_progress(0.95, "measuring the memory of a step")
        reserved_bytes = activation_bytes(
            decoder,
            model_config,
            num_tokens=config.max_num_batched_tokens or _CUDA_BATCHED_TOKENS,
            max_len=max_model_len,
            block_size=config.block_size,
            kv_dtype=self._kv_dtype(dtype),
            device=device,
        )
        storage = self._make_storage(model_config, max_model_len, dtype, device, reserved_bytes)
        if not has_triton():
            notice = "The GPU kernels are not in use: triton is not installed."
            logger.warning("%s", notice)
            return TorchForward(decoder, storage), storage, notice
        on_progress(0.97, "preparing decode steps")
        graphed = GraphedForward(
            decoder,
            storage,
            max_requests=min(MAX_GRAPH_REQUESTS, storage.num_blocks),
            max_blocks=-(-max_model_len // config.block_size),
            capture=CudaGraphs(),
        )
        return graphed, storage, notice

    def _make_storage(
        self,
        model_config: ModelConfig,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        reserved_bytes: int,
    ) -> KVCacheStorage:
        """Blocks in what is free; `reserved_bytes` are still to be taken by weights or steps."""
        block_size = self._config.block_size
        dtype = self._kv_dtype(dtype)
        block_bytes = bytes_per_block(model_config, block_size, dtype)
        num_spare = NUM_SPARE_BLOCKS if device.type == "cuda" else 0
        free_bytes = free_memory(device) - reserved_bytes - num_spare * block_bytes
        self._kv_budget_bytes = max(free_bytes, 0)
        num_blocks = choose_num_blocks(
            self._config,
            block_bytes=block_bytes,
            free_bytes=free_bytes,
            max_model_len=max_model_len,
            device=device,
        )
        return KVCacheStorage(
            model_config,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype,
            device=device,
            capacity=int(_MOST_KV_SHARE * self._kv_budget_bytes) // block_bytes,
            num_spare=num_spare,
        )

    def _kv_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.int8 if self._config.kv_dtype == "int8" else dtype

    def _warm_up(self, num_tokens: int) -> None:
        """One step into block 0, still nobody's, so that the first user does not pay for what
        libraries make at their first call. Drawn and penalised: those are kernels too."""
        request = Request(
            request_id="warm-up",
            prompt_token_ids=[0] * num_tokens,
            params=SamplingParams(repetition_penalty=1.1),
            owner="",
            cache_scope="",
        )
        part = ScheduledRequest(request, 0, num_tokens, [0], samples=True)
        self.execute(SchedulerOutput(0, [part], num_tokens))
        self.execute(SchedulerOutput(0, [], 0, finished_request_ids=[request.request_id]))

    def _eos_token_ids(self, model_config: ModelConfig) -> tuple[int, ...]:
        """The model's ids and the tokenizer's own; any of them ends a generation."""
        of_tokenizer = tokenizer_eos_id(self._config.model_dir)
        ids = model_config.eos_token_ids
        return ids if of_tokenizer is None or of_tokenizer in ids else (*ids, of_tokenizer)


def load_decoder(
    spec: DecoderSpec,
    checkpoint: Checkpoint,
    groups: GroupsFile | None = None,
    *,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Progress,
) -> Decoder:
    """A decoder with the checkpoint's weights, and beside them its groups where they are given.

    Raises:
        NotEnoughMemory: told from the headers, before anything is read.
        ModelLoadError: see `load_weights`.
    """
    needed, free = checkpoint.num_elements * dtype.itemsize, free_memory(device)
    if groups is not None:
        needed += memory_of(groups)
    if needed > free:
        raise NotEnoughMemory(
            f"The model's weights need {needed / 1e9:.1f} GB as {str(dtype).removeprefix('torch.')}"
            f", but only {free / 1e9:.1f} GB are free on {device}. Free memory or take a smaller "
            "model."
        )
    decoder = Decoder(spec, max_positions=max_positions, dtype=dtype, device=device)
    load_weights(decoder, checkpoint, on_progress)
    if groups is not None:
        add_groups(decoder, groups)
    return decoder
