"""Memory figures from a model's shape."""

import pytest

from inference.config import ModelConfig
from inference.kv_cache.sizing import (
    blocks_that_fit,
    capacity_table,
    contiguous_use,
    kv_bytes_per_token,
    paged_use,
)


def shape(num_layers, num_heads, num_kv_heads, head_dim):
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=1000,
        hidden_size=num_heads * head_dim,
        intermediate_size=64,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=8192,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        eos_token_ids=(2,),
        bos_token_id=1,
    )


SMOLLM2_135M = shape(30, 9, 3, 64)
LLAMA3_8B = shape(32, 32, 8, 128)


@pytest.mark.parametrize(
    ("model", "dtype", "expected"),
    [
        (SMOLLM2_135M, "bfloat16", 23_040),
        (SMOLLM2_135M, "float32", 46_080),
        (LLAMA3_8B, "float16", 131_072),
        # A byte a number, and four for the scale of each head.
        (SMOLLM2_135M, "int8", 30 * 2 * 3 * (64 + 4)),
        (LLAMA3_8B, "int8", 32 * 2 * 8 * (128 + 4)),
    ],
)
def test_bytes_per_token_follow_the_shape_and_the_key_value_heads(model, dtype, expected):
    assert kv_bytes_per_token(model, dtype) == expected


def test_blocks_that_fit_are_whole():
    one = 16 * 131_072
    assert blocks_that_fit(10 * one + one - 1, LLAMA3_8B, 16, "float16") == 10


def test_the_capacity_table_says_how_many_fit_at_what_context():
    rows = capacity_table(1024, 16, 1000, [100, 2048, 100_000])
    assert [(row.context_tokens, row.num_requests) for row in rows] == [
        (100, 146),
        (2048, 8),
        (100_000, 0),
    ]
    assert rows[1].bytes_per_request == 128_000


def test_the_founding_figures_of_memory_use():
    lengths = [412, 96, 1310]
    paged, contiguous = paged_use(lengths, 16), contiguous_use(lengths, 2048)
    assert paged.num_slots // 16 == 114
    assert round(100 * paged.share_full, 1) == 99.7
    assert round(100 * contiguous.share_full, 1) == 29.6
