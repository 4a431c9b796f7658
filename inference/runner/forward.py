"""The seam between a step's tensors and logits, with the forward pass that runs everywhere.

`TorchForward` is the readable one: every device and dtype, and the oracle of the others. Another
forward pass for CPU is made by `inference.runner.native_forward.make_native_forward`:

    make_native_forward(config, model_config, model_dir, storage, on_progress) -> Forward

It raises `ForwardUnavailable` with a plain reason where it cannot serve this model or machine.
It gets a `storage` of bfloat16 or int8 on the CPU.
"""

from typing import Protocol

import torch
from torch import Tensor

from inference.kv_cache.storage import KVCacheStorage
from inference.models.decoder import Decoder
from inference.runner.input_batch import InputBatch


class ForwardUnavailable(Exception):
    """This forward pass cannot be used here; the message is a plain reason for the console."""


class Forward(Protocol):
    """Computes logits and writes the new tokens' k and v into the storage it was made with.

    Made and called on the engine thread only.
    """

    @property
    def name(self) -> str:
        """For people: "torch", "native AVX-512 BF16"."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and the calculation."""

    def forward(self, batch: InputBatch) -> Tensor:
        """[num_samples, vocab] float32 on the batch's device, one row for each logits index.

        The caller may change the returned tensor; the next call may overwrite it. Tokens of
        requests that do not sample are computed for their k and v only.
        """

    def on_storage_moved(self) -> None:
        """The storage has other tensors than before."""


class TorchForward:
    """A decoder of torch modules over its storage."""

    name = "torch"

    def __init__(self, decoder: Decoder, storage: KVCacheStorage) -> None:
        self._decoder = decoder
        self._storage = storage

    @property
    def dtype(self) -> torch.dtype:
        return self._decoder.dtype

    def forward(self, batch: InputBatch) -> Tensor:
        logits: Tensor = self._decoder(batch, self._storage)
        return logits

    def on_storage_moved(self) -> None:
        """Nothing is kept of its tensors."""
