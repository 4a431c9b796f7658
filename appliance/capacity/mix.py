"""What made-up requests look like: lengths from a preset or from the team's ledger, fixed words.

The i-th request of a mix is the same in every run, so that runs and servers can be compared.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

# English text in a usual tokenizer; the warm-up request measures what the server's own makes of it.
TOKENS_PER_WORD = 1.3
MAX_ANSWER_TOKENS = 2048

_PROSE = """
backup disk index query table cache worker memory request server morning spike graph release schema
column record budget report meeting customer invoice contract draft chapter method function branch
review failure retry socket header payload cluster shard replica queue the of and to in for with on
at from after before between under while because which every another
"""
_CODE = """
def return import class self None True for in if else try except with open read write path value =
== += ( ) [ ] : . , row rows index name item items count total result error raise
"""


@dataclass(frozen=True, slots=True)
class Mix:
    name: str
    # (prompt tokens, answer tokens) to draw from.
    lengths: Sequence[tuple[int, int]]
    is_code: bool = False

    @property
    def median_prompt(self) -> int:
        return round(median(prompt for prompt, _ in self.lengths))

    @property
    def median_answer(self) -> int:
        return round(median(answer for _, answer in self.lengths))


@dataclass(frozen=True, slots=True)
class MadeUp:
    """One request to send."""

    text: str
    prompt_tokens: int
    answer_tokens: int


CHAT = Mix("chat", ((60, 64), (120, 96), (200, 128), (350, 160), (600, 256)))
DOCUMENTS = Mix("documents", ((1200, 128), (2000, 192), (3000, 192), (4500, 256), (6000, 320)))
CODE = Mix("code", ((300, 200), (600, 320), (900, 400), (1500, 480), (2500, 640)), is_code=True)
PRESETS = {mix.name: mix for mix in (CHAT, DOCUMENTS, CODE)}
TEAM = "team"
NAMES = {
    CHAT.name: "Short chat",
    DOCUMENTS.name: "Long documents",
    CODE.name: "Code",
    TEAM: "This team's last 7 days",
}


def made_up(
    mix: Mix,
    number: int,
    *,
    context_tokens: int | None = None,
    tokens_per_word: float = TOKENS_PER_WORD,
) -> MadeUp:
    """The request with this number. Cut so that prompt and answer fit into `context_tokens`.

    Every prompt begins differently, so that no prefix cache spares the server the work.
    """
    draw = random.Random(f"{mix.name}/{number}")
    prompt, answer = mix.lengths[draw.randrange(len(mix.lengths))]
    answer = max(1, min(answer, MAX_ANSWER_TOKENS))
    if context_tokens is not None:
        answer = min(answer, max(1, context_tokens // 4))
        # A tenth less than fits: words come out longer or shorter than on average.
        prompt = min(prompt, max(1, int((context_tokens - answer) * 0.9) - 40))
    vocabulary = (_CODE if mix.is_code else _PROSE).split()
    num_words = max(1, round(prompt / tokens_per_word))
    words = [f"{draw.randrange(16**6):06x}", *draw.choices(vocabulary, k=num_words - 1)]
    return MadeUp(" ".join(words), prompt, answer)
