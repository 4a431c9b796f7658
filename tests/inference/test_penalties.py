"""Counts of what was said grow with an answer and are those of the whole of it."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from inference.penalties import TokenCounts

ids = st.integers(0, 400)


@given(st.sets(ids), st.lists(ids, max_size=300), st.lists(st.integers(0, 300), max_size=5))
def test_tokens_counted_as_they_come_are_those_of_the_whole_output_a16(prompt, output, cuts):
    """Also where most are new: no room that was made at first is enough for all."""
    counts = TokenCounts(np.array(sorted(prompt), np.int64))
    for end in [*sorted(cut for cut in cuts if cut < len(output)), len(output)]:
        counts.count(output[:end])
    assert len(set(counts.ids.tolist())) == len(counts.ids)
    got = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert got == {**dict.fromkeys(prompt, 0), **Counter(output)}


def test_a_step_looks_at_new_tokens_alone():
    counts = TokenCounts(np.zeros(0, np.int64))
    output = [5, 5, 7]
    counts.count(output)
    counts.count([None, None, None, 9])  # what was counted is not read again
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {5: 2, 7: 1, 9: 1}
