"""The text of an answer while it grows."""

from bisect import bisect_right


class WrittenText:
    """Pieces as they came. A reader holds the number of characters it has and gets all after it.

    So a slow reader costs nothing and loses nothing, and a number stays true when an answer is
    gone on with later.
    """

    def __init__(self, begun: str = "") -> None:
        self._pieces: list[str] = []
        # Number of characters up to the end of each piece.
        self._ends: list[int] = []
        self.add(begun)

    def add(self, piece: str) -> None:
        if piece:
            self._ends.append(len(self) + len(piece))
            self._pieces.append(piece)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __str__(self) -> str:
        return "".join(self._pieces)

    def after(self, num_chars: int) -> str:
        """What a reader of the first `num_chars` lacks; takes time for that alone."""
        first = bisect_right(self._ends, num_chars)
        begin = self._ends[first - 1] if first else 0
        return "".join(self._pieces[first:])[num_chars - begin :]
