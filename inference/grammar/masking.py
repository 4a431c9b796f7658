"""Grammars on logits: bar what they do not allow, tell them what was sampled. Engine thread."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from inference.device_copies import to_device
from inference.grammar.matcher import MatcherFailed, TokenMatcher
from inference.outputs import TokenOutput
from inference.request import Request

_WORD = 32


def bar_tokens(
    logits: Tensor, requests: Sequence[Request], matchers: Mapping[int, TokenMatcher]
) -> dict[int, str]:
    """Set to -inf, in place, what a row's grammar does not allow next.

    Args:
        logits: [num_requests, vocab_size] fp32; only the rows in `matchers` are touched.

    Returns:
        What is wrong with the rows whose grammar cannot go on; all of their tokens are barred.
    """
    failures: dict[int, str] = {}
    vocab_size = logits.shape[1]
    words = np.zeros((len(matchers), -(-vocab_size // _WORD)), np.int32)
    for allowed, (row, matcher) in zip(words, matchers.items(), strict=True):
        mask = np.zeros(matcher.num_words, np.int32)
        try:
            matcher.fill(requests[row].output_token_ids, mask)
        except MatcherFailed as exc:
            failures[row] = _not_followed(exc)
            continue
        width = min(len(mask), len(allowed))
        allowed[:width] = mask[:width]
    moved = to_device({"words": words, "rows": np.array(list(matchers))}, logits.device)
    packed, rows = moved["words"], moved["rows"]
    bits = torch.arange(_WORD, dtype=torch.int32, device=logits.device)
    allows = ((packed[:, :, None] >> bits) & 1).bool().flatten(1)[:, :vocab_size]
    logits[rows] = logits[rows].masked_fill_(~allows, float("-inf"))
    return failures


def accept_tokens(
    outputs: list[TokenOutput], matchers: Mapping[int, TokenMatcher], failures: Mapping[int, str]
) -> None:
    """Tell the grammars what was sampled, and mark the rows that end or fail with it, in place."""
    for row, matcher in matchers.items():
        if row in failures:
            outputs[row] = _refusal(failures[row])
        elif outputs[row].error is None:
            try:
                outputs[row].ends = matcher.accept(outputs[row].token_id)
            except MatcherFailed as exc:
                outputs[row] = _refusal(_not_followed(exc))


def _refusal(why: str) -> TokenOutput:
    return TokenOutput(-1, error=why, is_refusal=True)


def _not_followed(failure: MatcherFailed) -> str:
    return f"The answer could not be held to the form that was asked for: {failure}."
