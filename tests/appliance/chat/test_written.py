"""The text of an answer: whatever number of characters a reader has, it gets all the rest once."""

from hypothesis import given
from hypothesis import strategies as st

from appliance.chat.written import WrittenText


@given(st.text(), st.lists(st.text()), st.integers(0, 1000))
def test_a_reader_gets_what_it_lacks(begun, pieces, has):
    written = WrittenText(begun)
    for piece in pieces:
        written.add(piece)
    whole = begun + "".join(pieces)
    assert str(written) == whole
    assert len(written) == len(whole)
    has = min(has, len(whole))
    assert written.after(has) == whole[has:]
