"""How much memory the largest step takes beside weights and KV pool: measured, not guessed."""

import torch

from inference.config import ModelConfig
from inference.kv_cache.storage import KVCacheStorage
from inference.models.decoder import Decoder
from inference.runner.input_batch import InputBatch

# Rows of logits in the profiled step; more requests than these seldom sample at once.
_PROFILED_SAMPLES = 256


def activation_bytes(
    decoder: Decoder,
    model_config: ModelConfig,
    *,
    num_tokens: int,
    max_len: int,
    block_size: int,
    kv_dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Peak of a CUDA device's memory during a step of `num_tokens`, above what was taken before.

    Sampling sorts nothing and works on copies of the logits: twice their size is added for it.
    """
    storage = KVCacheStorage(
        model_config, num_blocks=1, block_size=block_size, dtype=kv_dtype, device=device
    )
    batch = profile_batch(num_tokens, max_len, device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    logits = decoder(batch, storage)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    sampling = 2 * logits.nbytes
    del logits
    torch.cuda.empty_cache()
    return int(peak + sampling)


def profile_batch(num_tokens: int, max_len: int, device: torch.device) -> InputBatch:
    """Prompts of up to `max_len`, `num_tokens` in all, that write no slot and read block 0."""
    lengths = [max_len] * (num_tokens // max_len)
    if num_tokens % max_len:
        lengths.append(num_tokens % max_len)
    counts = torch.tensor([0, *lengths], device=device)
    num_samples = min(_PROFILED_SAMPLES, num_tokens)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    return InputBatch(
        input_ids=torch.zeros_like(positions),
        positions=positions,
        slot_mapping=torch.full_like(positions, -1),
        # Wide enough for blocks of one token.
        block_tables=torch.zeros((len(lengths), max(lengths)), dtype=torch.int32, device=device),
        seq_lens=counts[1:].int(),
        query_start_loc=counts.cumsum(0).int(),
        logits_indices=torch.arange(num_samples, device=device),
        num_tokens=num_tokens,
        num_requests=len(lengths),
        num_decodes=0,
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
    )
