"""Small tokenizers for tests: byte-level and SentencePiece kinds, with chosen control tokens."""

from typing import Any

from inference.text.tokenizer import Tokenizer
from inference.weights.gguf_tokenizer import build_tokenizer
from tests.inference.gguf_files import byte_level_vocabulary

CONTROL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|begin_of_text|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>"),
    *("<end_of_turn>", "[INST]", "[/INST]", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
    *("<think>", "</think>"),
]
# Added like control tokens, but shown in text: some models mark their thoughts with such.
SHOWN_CONTROL = ("<think>", "</think>")


def byte_level_metadata(bos: str | None = None, pre: str = "gpt-2") -> dict[str, Any]:
    tokens, merges = byte_level_vocabulary()
    tokens = [*CONTROL, *tokens[3:]]
    types = [4 if token in SHOWN_CONTROL else 3 for token in CONTROL]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types + [1] * (len(tokens) - len(types)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": bos is not None,
        **({"tokenizer.ggml.bos_token_id": tokens.index(bos)} if bos else {}),
    }


def sentencepiece_metadata() -> dict[str, Any]:
    pieces = ["▁", *"abcdehilnortuy", "he", "▁he", "ll", "▁hell", "▁hello"]
    tokens = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    tokens += [*(f"<0x{n:02X}>" for n in range(256)), *pieces]
    special = 5 + 256
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * special + [-float(n) for n in range(len(pieces), 0, -1)],
        "tokenizer.ggml.token_type": [2, 3, 3, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def make_tokenizer(metadata: dict[str, Any], template: str = "") -> Tokenizer:
    document, config = build_tokenizer(metadata)
    return Tokenizer(document, config, template)
