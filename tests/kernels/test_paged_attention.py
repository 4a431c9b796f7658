import pytest
import torch
from torch import Tensor

from kernels.backends import available
from kernels.errors import KernelArgumentError
from kernels.paged_attention import paged_attention

# fp32: sums in another order. 16 bit: inputs are rounded once more before the last product.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def naive(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
) -> Tensor:
    """Scalar loops over one request's contiguous keys: the definition, in double precision."""
    num_queries, num_heads, _ = query.shape
    seq_len, num_kv_heads, _ = key.shape
    query, key, value = query.double(), key.double(), value.double()
    output = torch.zeros_like(query)
    for row in range(num_queries):
        position = seq_len - num_queries + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            scores = key[first : position + 1, kv_head] @ query[row, head] * scale
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            output[row, head] = scores.softmax(0) @ value[first : position + 1, kv_head]
    return output


def paged(
    rng: torch.Generator, lengths: list[tuple[int, int]], heads: tuple[int, int], block_size: int
) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor, Tensor]]]:
    """Arguments with shuffled blocks, NaN wherever no token lies; and each request by itself."""
    num_heads, num_kv_heads = heads
    head_dim = 16
    max_blocks = max(-(-seq // block_size) for _, seq in lengths)
    order = torch.randperm(len(lengths) * max_blocks + 3, generator=rng).tolist()
    shape = (len(order), block_size, num_kv_heads, head_dim)
    key_cache = torch.full(shape, float("nan"))
    value_cache = torch.full(shape, float("nan"))
    # Entries past a request's length point nowhere.
    tables = torch.full((len(lengths), max_blocks), 2**30, dtype=torch.int32)
    requests = []
    for row, (num_queries, seq_len) in enumerate(lengths):
        query = torch.randn(num_queries, num_heads, head_dim, generator=rng)
        key = torch.randn(seq_len, num_kv_heads, head_dim, generator=rng)
        value = torch.randn(seq_len, num_kv_heads, head_dim, generator=rng)
        requests.append((query, key, value))
        for index in range(-(-seq_len // block_size)):
            block = order.pop()
            tables[row, index] = block
            part = slice(index * block_size, min(seq_len, (index + 1) * block_size))
            key_cache[block, : part.stop - part.start] = key[part]
            value_cache[block, : part.stop - part.start] = value[part]
    counts = torch.tensor([0] + [num_queries for num_queries, _ in lengths])
    arguments = {
        "query": torch.cat([query for query, _, _ in requests]),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_tables": tables,
        "seq_lens": torch.tensor([seq for _, seq in lengths], dtype=torch.int32),
        "query_start_loc": counts.cumsum(0).int(),
    }
    return arguments, requests


LENGTHS = {
    "one decode": [(1, 1)],
    "decodes of unlike length": [(1, 5), (1, 97), (1, 16), (1, 50), (1, 17)],
    "whole prompts": [(7, 7), (33, 33)],
    "decodes and prompt chunks at offsets": [(1, 20), (1, 3), (9, 30), (16, 16), (2, 64)],
}


@pytest.mark.parametrize("backend", available())
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=str)
@pytest.mark.parametrize(("window", "cap"), [(None, None), (6, None), (None, 2.0), (5, 1.5)])
def test_equals_the_definition(backend, lengths, heads, window, cap, rng) -> None:
    arguments, requests = paged(rng, lengths, heads, block_size=8)
    got = paged_attention(
        **arguments, scale=0.3, sliding_window=window, soft_cap=cap, backend=backend
    )
    want = torch.cat([naive(q, k, v, 0.3, window, cap) for q, k, v in requests])
    torch.testing.assert_close(got, want.float(), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("backend", available())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_stays_near_fp32(backend, dtype, cache_dtype, rng) -> None:
    arguments, _ = paged(rng, LENGTHS["decodes and prompt chunks at offsets"], (6, 2), 16)
    arguments["query"] = arguments["query"].to(dtype)
    for name in ("key_cache", "value_cache"):
        arguments[name] = arguments[name].to(cache_dtype)
    exact = {name: t.float() if t.is_floating_point() else t for name, t in arguments.items()}
    got = paged_attention(**arguments, scale=0.25, backend=backend)
    want = paged_attention(**exact, scale=0.25)
    assert got.dtype == dtype
    tolerance = max(TOLERANCE[dtype], TOLERANCE[cache_dtype])
    torch.testing.assert_close(got.float(), want, atol=2 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", available())
def test_takes_a_query_that_is_a_view_and_changes_no_input(backend, rng) -> None:
    arguments, _ = paged(rng, LENGTHS["decodes and prompt chunks at offsets"], (6, 2), 8)
    plain = paged_attention(**arguments, scale=0.3, backend=backend)
    wide = torch.cat([arguments["query"], torch.full_like(arguments["query"], 9.0)], dim=1)
    arguments["query"] = wide[:, :6]
    before = {name: tensor.clone() for name, tensor in arguments.items()}
    again = paged_attention(**arguments, scale=0.3, backend=backend)
    torch.testing.assert_close(again, plain, atol=0, rtol=0)
    for name, tensor in arguments.items():
        torch.testing.assert_close(tensor, before[name], atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("backend", available())
def test_reads_blocks_past_two_gibibytes(backend, rng) -> None:
    torch.use_deterministic_algorithms(False)  # else 2 GiB are really filled
    num_blocks = 2**31 // (16 * 64 * 2) + 2
    cache = torch.empty(num_blocks, 16, 1, 64, dtype=torch.float16)
    cache[num_blocks - 1] = torch.randn(16, 1, 64, generator=rng)
    got = paged_attention(
        torch.randn(1, 2, 64, generator=rng).half(),
        cache,
        cache,
        torch.tensor([[num_blocks - 1]], dtype=torch.int32),
        torch.tensor([1], dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
        scale=0.125,
        backend=backend,
    )
    # One visible token: attention is its value.
    torch.testing.assert_close(got, cache[num_blocks - 1, :1].expand(1, 2, 64))


BAD = {
    "query": [
        ("wrong head size", lambda t: t[..., :8]),
        ("heads that do not divide", lambda t: t[:, :5]),
        ("whole numbers", lambda t: t.long()),
    ],
    "value_cache": [
        ("another shape", lambda t: t[:, :4]),
        ("another dtype", lambda t: t.half()),
        ("strided", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)),
    ],
    "block_tables": [("int64", lambda t: t.long()), ("flat", lambda t: t.flatten())],
    "seq_lens": [("too few", lambda t: t[1:]), ("elsewhere", lambda t: t.to("meta"))],
    "query_start_loc": [("too few", lambda t: t[1:])],
}


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        pytest.param(name, spoil, id=f"{name}: {what}")
        for name, ways in BAD.items()
        for what, spoil in ways
    ],
)
def test_refuses_bad_arguments_by_name(name, spoil, rng) -> None:
    arguments, _ = paged(rng, LENGTHS["decodes of unlike length"], (6, 2), 8)
    arguments[name] = spoil(arguments[name])
    with pytest.raises(KernelArgumentError) as refused:
        paged_attention(**arguments, scale=0.3)
    assert refused.value.argument == name or name == "query"


@pytest.mark.parametrize("option", [{"sliding_window": 0}, {"soft_cap": 0.0}])
def test_refuses_options_out_of_range(option, rng) -> None:
    arguments, _ = paged(rng, LENGTHS["one decode"], (4, 4), 8)
    with pytest.raises(KernelArgumentError, match=next(iter(option))):
        paged_attention(**arguments, scale=0.3, **option)
