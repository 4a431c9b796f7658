"""A GGUF file's vocabulary -> tokenizer.json and tokenizer_config.json, as plain data. No torch."""

from collections.abc import Mapping
from typing import Any

from inference.errors import ModelLoadError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CL100K = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# `tokenizer.ggml.pre` -> (split pattern, digits are single tokens first, NFC, ignore merges)
_PRE_TOKENIZERS: Mapping[str, tuple[str, bool, bool, bool]] = {
    "default": (_GPT2, False, False, False),
    "gpt-2": (_GPT2, False, False, False),
    "olmo": (_GPT2, False, False, False),
    "smollm": (_GPT2, True, False, False),
    "starcoder": (_GPT2, True, False, False),
    "refact": (_GPT2, True, False, False),
    "command-r": (_GPT2, True, False, False),
    "llama-bpe": (_CL100K, False, False, True),
    "llama3": (_CL100K, False, False, True),
    "llama-v3": (_CL100K, False, False, True),
    "dbrx": (_CL100K, False, False, False),
    "smaug-bpe": (_CL100K, False, False, False),
    "qwen2": (_QWEN2, False, True, False),
    "gpt-4o": (_GPT4O, False, False, False),
    "tekken": (_TEKKEN, False, False, True),
}
_PRE_WITH_BOS = {"llama-bpe", "llama3", "llama-v3", "tekken"}


def build_tokenizer(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (tokenizer.json, tokenizer_config.json).

    Raises:
        ModelLoadError: the vocabulary is missing, inconsistent, or of an unsupported kind.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens, types = _vocabulary(metadata)
    if kind == "gpt2":
        pre = metadata.get("tokenizer.ggml.pre", "default")
        parts = _byte_level_parts(metadata, tokens, pre)
        adds_bos = pre in _PRE_WITH_BOS
    elif kind == "llama":
        parts = _sentencepiece_parts(metadata, tokens, types)
        adds_bos = True
    else:
        raise ModelLoadError(
            f"The vocabulary is of the kind {kind!r}; gpt2 (byte-level BPE) and llama "
            "(SentencePiece) are supported."
        )
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos))
    special = _special_tokens(metadata, tokens)
    document: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, types),
        **parts,
    }
    document["post_processor"] = _post_processor(special.get("bos_token"), tokens, adds_bos)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": adds_bos,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    return document, config


def _vocabulary(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise ModelLoadError("The file holds no vocabulary (tokenizer.ggml.tokens).")
    types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelLoadError("The vocabulary's token types do not match its tokens.")
    return tokens, types


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    named = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    found = {}
    for name, short in named.items():
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            found[f"{short}_token"] = tokens[token_id]
    return found


def _added_tokens(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    return [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN)
    ]


def _post_processor(bos: str | None, tokens: list[str], adds_bos: bool) -> dict[str, Any] | None:
    if not adds_bos or bos is None:
        return None
    bos_piece = {"SpecialToken": {"id": bos, "type_id": 0}}
    text, other = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [bos_piece, text],
        "pair": [bos_piece, text, other],
        "special_tokens": {bos: {"id": bos, "ids": [tokens.index(bos)], "tokens": [bos]}},
    }


def _byte_level_parts(metadata: Mapping[str, Any], tokens: list[str], pre: str) -> dict[str, Any]:
    if pre not in _PRE_TOKENIZERS:
        raise ModelLoadError(
            f"The vocabulary splits text the {pre!r} way; supported are "
            f"{', '.join(_PRE_TOKENIZERS)}."
        )
    pattern, splits_digits, nfc, ignore_merges = _PRE_TOKENIZERS[pre]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps: list[dict[str, Any]] = []
    if splits_digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if pattern == _GPT2:
        steps.append({**byte_level, "use_regex": True})
    else:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
        steps += [{**split, "invert": False}, {**byte_level, "use_regex": False}]
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelLoadError("The vocabulary has no merges (tokenizer.ggml.merges).")
    pairs = [merge.split(" ") for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise ModelLoadError("A merge of the vocabulary is not a pair.")
    return {
        "normalizer": {"type": "NFC"} if nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": pairs,
        },
    }


def _sentencepiece_parts(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int]
) -> dict[str, Any]:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelLoadError("The vocabulary's scores are missing or do not match its tokens.")
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == 2), None)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    normalizers: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    ]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": "▁"})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": _merges_from_scores(tokens, types, scores),
        },
    }


def _merges_from_scores(
    tokens: list[str], types: list[int], scores: list[float]
) -> list[list[str]]:
    """The merges that a SentencePiece BPE vocabulary stands for, best score first.

    SentencePiece merges the neighbours whose join has the best score; so every way to cut a piece
    in two known pieces is a merge, ranked by the piece's score.
    """
    plain = (_NORMAL, _USER_DEFINED)
    ids = {
        token: token_id
        for token_id, token in enumerate(tokens)
        if types[token_id] in plain and token
    }
    ranked: list[tuple[float, int, int, int, str, str]] = []
    for token, token_id in ids.items():
        if types[token_id] != _NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[token_id], token_id, ids[left], ids[right], left, right))
    ranked.sort()
    return [[left, right] for *_, left, right in ranked]
