"""The small protocol behind the gateway. The in-process engine is the first implementation."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from appliance.serving.types import GenerationEvent, GenerationRequest, ModelInfo


class Prepared(Protocol):
    """A request whose prompt is tokenised and checked, but which is not queued yet."""

    @property
    def prompt_tokens(self) -> int: ...

    # The prompt as the model sees it: with template and special tokens.
    @property
    def token_ids(self) -> Sequence[int]: ...

    # Most tokens the answer can have: max_tokens, cut to what the context leaves.
    @property
    def max_completion_tokens(self) -> int: ...


class TokenStream(Protocol):
    """Events of one queued generation. Ends with exactly one `Finished`.

    Read without waiting: `take` gives all that came since the last look, and `on_news` is called
    when there is more, on the event loop and perhaps in vain. A task woken for each source, and
    another for each reader, cost more than the text.

    `aclose()` aborts it, gives its memory back, and is safe to call at any time and twice. The
    counts stay readable afterwards and are the truth, also after an abort.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...

    def listen(self, on_news: Callable[[], None]) -> None: ...
    def take(self) -> Sequence[GenerationEvent]: ...
    async def aclose(self) -> None: ...


class Backend(Protocol):
    """Every method is called on the event loop and returns at once or awaits; none blocks it."""

    @property
    def model(self) -> ModelInfo | None:
        """The loaded model; None while loading or after a failure."""

    async def prepare(self, request: GenerationRequest) -> Prepared:
        """Template, tokenise and check. Raises BadRequest and its kinds, EngineUnavailable."""

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, control tokens written out. Raises BadRequest, EngineUnavailable."""

    async def generate(self, prepared: Prepared) -> TokenStream:
        """Queue it. Raises QueueIsFull, EngineUnavailable."""

    def abort(self, request_id: str, reason: str = "abort") -> bool:
        """End one request, whoever owns it; False if it is not known. Idempotent."""

    def live_labels(self) -> Sequence[Mapping[str, str]]:
        """Labels (`user_id`, `key_id`, …) of every request that was queued and has not ended."""

    def state(self) -> Mapping[str, Any]:
        """JSON-able picture for `/api/engine` and the console: see serving/README.md."""

    def block_map(self) -> Mapping[str, Any]:
        """JSON-able block map: step, cells, holders, partial, token_start."""

    def events_since(self, event_id: int) -> Sequence[Mapping[str, Any]]:
        """Engine events after `event_id`, oldest first; the ring is bounded."""

    def swap_model(
        self,
        name: str,
        resolve: Callable[[Callable[[float, str], None]], Path],
        *,
        drain_s: float,
        on_loaded: Callable[[], None],
    ) -> None:
        """Begin to serve another model: see `model_swap`. Raises Conflict.

        Args:
            resolve: finds the model's folder, on a thread of the back end.
            on_loaded: called there once the model serves.
        """

    def tune(self, changes: Mapping[str, Any]) -> None:
        """Apply live settings. Raises BadRequest naming the setting and what is allowed."""
