"""Small GGUF files for tests, written with the format's own library."""

from pathlib import Path

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 256, 4, 2, 512, 2
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' "
    "+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level_vocabulary() -> tuple[list[str], list[str]]:
    """Three control tokens, all 256 byte letters, two merged pieces; and the merges."""
    letters = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters += [chr(256 + n) for n in range(68)]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "he", "Ġa"]
    return tokens, ["h e", "Ġ a"]


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Query or key rows as a GGUF file of the llama kind holds them."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def llama_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 weights in checkpoint order, under GGUF names."""
    rng = np.random.default_rng(seed)
    head_dim = HIDDEN // HEADS
    vocab = len(byte_level_vocabulary()[0])
    shapes = {"token_embd.weight": (vocab, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (KV_HEADS * head_dim, HIDDEN),
            f"blk.{layer}.attn_v.weight": (KV_HEADS * head_dim, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate.weight": (INNER, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (INNER, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, INNER),
        }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_llama(
    path: Path,
    weights: dict[str, np.ndarray],
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q4_1,
    **metadata: object,
) -> None:
    """A tiny llama file; matrices in `kind`, norms in float32. `metadata` overrides strings."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    tokens, merges = byte_level_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(str(metadata.get("pre", "smollm")))
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)
    for name, values in weights.items():
        if ".attn_q." in name:
            values = interleaved(values, HEADS)
        elif ".attn_k." in name:
            values = interleaved(values, KV_HEADS)
        if values.ndim == 2:
            data = gguf.quants.quantize(values, kind)
            writer.add_tensor(name, data, raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
