"""What each live setting does, in words, and what its field looks like on the tuning page.

Engine and chat check every value; the ranges here only shape the fields. A setting that they
have and this list lacks is not shown. Labels are those of the events.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance.console.event_words import CLASS_WORDS, SETTING_WORDS, value_words


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    help: str
    # number, switch, choice or shares
    kind: str = "number"
    low: float = 0
    # Of the field; the slider ends earlier, where values stop being usual.
    high: float = 0
    slider_high: float = 0
    step: float = 1
    unit: str = ""
    choices: tuple[tuple[str, str], ...] = ()
    # A word that the field takes beside numbers.
    word: str = ""

    @property
    def label(self) -> str:
        return SETTING_WORDS[self.name]

    @property
    def allowed(self) -> str:
        """What the field takes, for a number."""
        also = f", or {self.word}" if self.word else ""
        return f"{self.low:g} to {self.high:,.16g}{also}"


FIELDS = (
    Field(
        "slots",
        "How many answers are written at the same time. The rest wait in line. “auto” lets the "
        "server choose from the memory and the length of requests.",
        low=1,
        high=4096,
        slider_high=64,
        word="auto",
    ),
    Field(
        "max_model_len",
        "Most tokens of one conversation: prompt, files and answer together. Lower: more answers "
        "fit into the memory. “auto”: as long as the model and the memory allow. Answers that "
        "were asked for before keep their limit.",
        low=64,
        high=100_000_000,
        slider_high=32_768,
        step=16,
        word="auto",
    ),
    Field(
        "chat_max_tokens",
        "Most tokens that an answer in the chat may have before it ends with “Continue”, so that "
        "one that rambles does not hold its slot. Scripts say their own limit.",
        low=16,
        high=1_000_000,
        slider_high=8192,
        step=16,
    ),
    Field(
        "reserved_interactive_slots",
        "Scripts cannot take these, so people at a screen do not wait behind them.",
        high=4096,
        slider_high=16,
    ),
    Field(
        "max_num_batched_tokens",
        "Tokens computed in one step. Higher: prompts are read faster. Lower: running answers "
        "stutter less.",
        low=1,
        high=65_536,
        slider_high=4096,
    ),
    Field(
        "kv_memory_share",
        "How much of the memory that the model leaves the answers may have. Smaller takes effect "
        "as running answers make room; none is stopped. “auto” is what the server chose at its "
        "start.",
        low=0.001,
        high=0.95,
        slider_high=0.95,
        step=0.01,
        word="auto",
    ),
    Field(
        "admission_headroom",
        "Share of the memory for answers that stays free when a request starts, so that running "
        "ones can grow. Higher: fewer preemptions, more waiting.",
        high=0.9,
        slider_high=0.9,
        step=0.01,
    ),
    Field(
        "enable_prefix_cache",
        "Prompts that start like an earlier one of the same user are not computed again.",
        kind="switch",
    ),
    Field(
        "max_running_per_owner",
        "Most answers of one user at the same time. 0 sets no limit.",
        high=4096,
        slider_high=16,
    ),
    Field(
        "max_blocks_per_owner",
        "Most blocks of one user's running requests: at it the newest makes room. 0 sets none.",
        high=100_000_000,
        slider_high=4096,
    ),
    Field(
        "aging_s",
        "A user or a kind of request that waited this long goes next, whatever its order.",
        low=0.1,
        high=86_400,
        slider_high=120,
        step=0.1,
        unit="s",
    ),
    Field(
        "class_weights",
        "Chat first, then scripts, then background work; or while several wait, each gets its part "
        "of the tokens: weight 4 twice as much as weight 2.",
        kind="shares",
        low=0.01,
        high=100,
        choices=tuple(CLASS_WORDS.items()),
    ),
    Field(
        "max_waiting_requests",
        "Requests past this many are turned away with “try again”.",
        low=1,
        high=1_000_000,
        slider_high=2000,
    ),
    Field(
        "max_waiting_tokens",
        "The same, counted in tokens of the waiting prompts.",
        low=1,
        high=1_000_000_000,
        slider_high=4_000_000,
        step=1000,
    ),
    Field(
        "policy",
        "Static batching starts a group together and waits for its longest answer. It is here to "
        "compare with, and slower.",
        kind="choice",
        choices=(("continuous", "continuous"), ("static", "static")),
    ),
    Field(
        "speculation",
        "Guesses several words at once where an answer repeats itself or its question, and keeps "
        "those that the model would have written anyway. “auto”: only where that measures faster.",
        kind="choice",
        choices=(("auto", "auto"), ("on", "on"), ("off", "off")),
    ),
    Field(
        "reserve_tokens",
        "Takes room for this many tokens for each request from its start on, as systems without "
        "paging do. 0 is paging. It is here to compare with.",
        high=10_000_000,
        slider_high=16_384,
    ),
)


def fields_of(state: Mapping[str, Any]) -> list[tuple[Field, Mapping[str, Any], str]]:
    """Each field, requested and effective value with the reason, and what holds in words."""
    settings = {**(state.get("settings") or {}), "slots": state.get("slots")}
    return [
        (field, settings[field.name], value_words(settings[field.name]["effective"]))
        for field in FIELDS
        if settings.get(field.name)
    ]
