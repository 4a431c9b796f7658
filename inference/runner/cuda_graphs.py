"""Decode steps as CUDA graphs: a step of many small launches becomes one.

A graph is captured for some batch sizes (buckets); a step of fewer requests is padded to the next
one. A padding row writes no slot (-1) and has a context of 0 tokens, which gives it zeros. Steps
with prompt chunks run as they are. Owned by the engine thread.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from inference.kv_cache.storage import KVCacheStorage
from inference.models.decoder import Decoder
from inference.runner.input_batch import InputBatch

logger = logging.getLogger(__name__)

MAX_GRAPH_REQUESTS = 256


def batch_buckets(largest: int) -> tuple[int, ...]:
    """Batch sizes with a graph, ascending, up to `largest`: powers of 2, and halfway from 8 on.

    So at most a third of a step's rows is padding where a row costs anything.
    """
    powers = [1 << exponent for exponent in range(largest.bit_length())]
    halfway = [power + power // 2 for power in powers if power >= 8]
    sizes = {size for size in (*powers, *halfway) if size <= largest}
    return tuple(sorted(sizes | {largest}))


def bucket_for(num_requests: int, buckets: tuple[int, ...]) -> int | None:
    """The smallest bucket that holds so many; None when none does."""
    return next((bucket for bucket in buckets if bucket >= num_requests), None)


class DecodeBuffers:
    """The tensors that all graphs read: one row a request, of the largest bucket.

    Args:
        max_requests: rows.
        max_blocks: width of the block tables.
    """

    def __init__(self, max_requests: int, max_blocks: int, device: torch.device) -> None:
        def rows(dtype: torch.dtype, fill: int = 0) -> Tensor:
            return torch.full((max_requests,), fill, dtype=dtype, device=device)

        self._input_ids = rows(torch.int64)
        self._positions = rows(torch.int64)
        self._slot_mapping = rows(torch.int64, -1)
        self._seq_lens = rows(torch.int32)
        self._block_tables = torch.zeros(
            (max_requests, max_blocks), dtype=torch.int32, device=device
        )
        self._counting = torch.arange(max_requests + 1, device=device)
        self._query_start_loc = self._counting.int()

    def view(self, bucket: int) -> InputBatch:
        """The first `bucket` rows as a step; every row samples."""
        return InputBatch(
            input_ids=self._input_ids[:bucket],
            positions=self._positions[:bucket],
            slot_mapping=self._slot_mapping[:bucket],
            block_tables=self._block_tables[:bucket],
            seq_lens=self._seq_lens[:bucket],
            query_start_loc=self._query_start_loc[: bucket + 1],
            logits_indices=self._counting[:bucket],
            num_tokens=bucket,
            num_requests=bucket,
            num_decodes=bucket,
            max_query_len=1,
            max_seq_len=self._block_tables.shape[1],
        )

    def clear(self) -> None:
        """Make every row padding."""
        self._slot_mapping.fill_(-1)
        self._seq_lens.zero_()

    def fill(self, batch: InputBatch, bucket: int) -> None:
        """Take in a decode step; rows from its end up to `bucket` become padding."""
        count, width = batch.block_tables.shape
        self._input_ids[:count].copy_(batch.input_ids)
        self._positions[:count].copy_(batch.positions)
        self._slot_mapping[:count].copy_(batch.slot_mapping)
        self._seq_lens[:count].copy_(batch.seq_lens)
        self._block_tables[:count, :width].copy_(batch.block_tables)
        if count < bucket:
            # Ids and positions of padding stay those of former steps: valid, and of no effect.
            self._slot_mapping[count:bucket].fill_(-1)
            self._seq_lens[count:bucket].zero_()


# Runs a step on the buffers' tensors; gives a function that does it again and returns its logits.
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


class GraphedForward:
    """A decoder whose decode steps are replayed.

    Args:
        capture: makes a replay of a call; `CudaGraphs` on a device.
    """

    def __init__(
        self,
        decoder: Decoder,
        storage: KVCacheStorage,
        *,
        max_requests: int,
        max_blocks: int,
        capture: Capture,
    ) -> None:
        self._decoder = decoder
        self._storage = storage
        self._buckets = batch_buckets(max_requests)
        self._buffers = DecodeBuffers(max_requests, max_blocks, storage.device)
        self._capture = capture
        self._replays: dict[int, Callable[[], Tensor]] = {}
        self.on_storage_moved()

    @property
    def most_requests(self) -> int:
        """Of a step that is replayed."""
        return self._buckets[-1]

    @property
    def name(self) -> str:
        quantised = ", quantised weights" if self._decoder.reads_groups else ""
        return f"torch and Triton, CUDA graphs{quantised}"

    @property
    def dtype(self) -> torch.dtype:
        return self._decoder.dtype

    def forward(self, batch: InputBatch) -> Tensor:
        """See `Forward.forward`. Logits are overwritten by the next step."""
        bucket = bucket_for(batch.num_requests, self._buckets)
        if bucket is None or batch.num_decodes < batch.num_requests:
            logits: Tensor = self._decoder(batch, self._storage)
            return logits
        self._buffers.fill(batch, bucket)
        logits = self._replays[bucket]()
        if batch.logits_indices.shape[0] == batch.num_requests:
            return logits[: batch.num_requests]
        return logits[batch.logits_indices]

    def on_storage_moved(self) -> None:
        """Capture again: a graph has the addresses of the tensors it was captured with."""
        if self._storage.device.type == "cuda":
            # A graph must not go while it runs.
            torch.cuda.synchronize()
        self._replays = {}
        # Capturing runs the steps: they must not write into anybody's blocks.
        self._buffers.clear()
        # The largest first, so that the others fit into its memory.
        self._replays = {
            bucket: self._capture(self._call_on(bucket)) for bucket in reversed(self._buckets)
        }
        logger.info("Captured decode steps of %s requests.", ", ".join(map(str, self._buckets)))

    def _call_on(self, bucket: int) -> Callable[[], Tensor]:
        batch = self._buffers.view(bucket)

        def call() -> Tensor:
            logits: Tensor = self._decoder(batch, self._storage)
            return logits

        return call


class CudaGraphs:
    """Captures calls on the current device; all graphs share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        # Twice outside of a graph: kernels are compiled and libraries make what they keep.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = call()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay
