"""Messages -> token ids, by the template that came with the model. No torch.

The text of a message can never become a control token: see `untrusted_text`. What the template
itself writes can, and only that.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from inference.errors import InvalidPrompt, ModelLoadError
from inference.text.template_sandbox import (
    TemplateBudgetExceeded,
    TemplateEnvironment,
    TemplateRefusal,
    bounded_rendering,
)
from inference.text.tokenizer import END_MARK, Tokenizer, read_template_source
from inference.text.untrusted_text import Masker

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_TEMPLATE_CHARS = 1_000_000
_MAX_REFUSAL_CHARS = 200
# What a template that does not fit the messages may raise while it renders.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """`num_public_prefix_tokens` leading ids hold only what the server itself put in."""

    token_ids: list[int]
    num_public_prefix_tokens: int


class ChatTemplate:
    """One model's template. Immutable after loading; any thread may use it."""

    def __init__(self, source: str | None, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._masker = Masker(tokenizer.markers)
        self._template = _compiled(source) if source else None
        self._public: dict[str | None, tuple[date, list[int]]] = {}
        self._reads_system = True
        if self._template is not None:
            self._try_out()
            self._reads_system = self._is_system_read()

    @classmethod
    def from_dir(cls, model_dir: Path, tokenizer: Tokenizer) -> "ChatTemplate":
        """Load the template of a model folder; a model without one takes no messages.

        Raises:
            ModelLoadError: the template is broken, or reaches for what is not its own.
        """
        try:
            return cls(read_template_source(model_dir), tokenizer)
        except (OSError, ValueError, AttributeError) as exc:
            raise ModelLoadError(
                f"The chat template of {model_dir} cannot be read: {exc}."
            ) from exc

    @property
    def exists(self) -> bool:
        """Whether the model has a chat template at all."""
        return self._template is not None

    def encode(
        self,
        messages: Sequence[Message],
        *,
        server_prompt: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        most_tokens: int | None = None,
    ) -> RenderedPrompt:
        """Token ids of a conversation, ready for the model's answer.

        Args:
            messages: {"role", "content", …}; content is a text, None, or a list of text parts.
            server_prompt: the server's own instructions; they go before a system message, or before
                the user's first where the template knows no system messages.
            tools: tool descriptions for templates that know tools.
            options: further names for the template, such as enable_thinking.
            add_generation_prompt: False leaves out the beginning of an answer; what the model says
                then may be anybody's turn.
            continue_final_message: the last message, the assistant's, is left open and the answer
                goes on from its last character; nothing begins an answer then.
            most_tokens: how many are of use.

        Raises:
            TextTooLong: it has far more than `most_tokens`.
            InvalidPrompt: no messages, an unknown role or content, or the template refuses.
        """
        plain = self._with_server_prompt(_plain_messages(messages), server_prompt)
        if continue_final_message:
            _check_continues(plain)
        token_ids = self._render(
            plain, tools, options, add_generation_prompt, continue_final_message, most_tokens
        )
        num_public = 0
        if not tools and not options:
            for ours, theirs in zip(token_ids, self._public_ids(server_prompt), strict=False):
                if ours != theirs:
                    break
                num_public += 1
        return RenderedPrompt(token_ids, num_public)

    def _public_ids(self, server_prompt: str | None) -> list[int]:
        """What every conversation with this server prompt starts with."""
        today = date.today()
        known = self._public.get(server_prompt)
        if known is None or known[0] != today:
            probes = [
                self._render(
                    self._with_server_prompt([{"role": "user", "content": text}], server_prompt),
                    None,
                    None,
                )
                for text in ("a", "0")
            ]
            same = 0
            while same < min(map(len, probes)) and probes[0][same] == probes[1][same]:
                same += 1
            if len(self._public) > 100:
                self._public.clear()
            known = self._public[server_prompt] = (today, probes[0][:same])
        return known[1]

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any] | None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        most_tokens: int | None = None,
    ) -> list[int]:
        if self._template is None:
            raise InvalidPrompt(
                "This model has no chat template, so it takes no messages; send a plain prompt.",
                param="messages",
            )
        wrapped = [self._wrapped(message) for message in messages]
        if continue_final_message:
            wrapped[-1]["content"] = self._masker.with_end_mark(wrapped[-1]["content"])
        variables = {
            **self._tokenizer.named_tokens,
            **self._masker.wrap(options or {}),
            "messages": wrapped,
            "tools": self._masker.wrap(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        try:
            with bounded_rendering():
                text = self._template.render(variables)
        except TemplateRefusal as exc:
            raise InvalidPrompt(
                f"The model's chat template refuses these messages: {_short(exc)}",
                param="messages",
            ) from exc
        except TemplateBudgetExceeded as exc:
            raise InvalidPrompt(
                f"The model's chat template was stopped: {exc}.", param="messages"
            ) from exc
        except _RENDER_ERRORS as exc:
            raise InvalidPrompt(
                f"The model's chat template cannot render these messages: {_short(exc)}",
                param="messages",
            ) from exc
        if continue_final_message:
            text = _up_to_end_mark(text)
        unmask = self._masker.unmask
        return self._with_one_bos(
            self._tokenizer.encode_masked(text, unmask, most_tokens=most_tokens)
        )

    def _wrapped(self, message: Message) -> dict[str, Any]:
        # A role is one of ROLES, so it may take part in a marker; nothing else may.
        return {**self._masker.wrap(dict(message)), "role": message["role"]}

    def _with_one_bos(self, token_ids: list[int]) -> list[int]:
        """Exactly one BOS in front if the model wants one, whether or not the template wrote it."""
        prefix = list(self._tokenizer.prefix_ids)
        if len(prefix) != 1:
            return token_ids
        start = 0
        while token_ids[start : start + 1] == prefix:
            start += 1
        return prefix + token_ids[start:]

    def _with_server_prompt(
        self, messages: list[Message], server_prompt: str | None
    ) -> list[Message]:
        if not server_prompt:
            return messages
        role = "system" if self._reads_system else "user"
        at = next((i for i, message in enumerate(messages) if message["role"] == role), None)
        if at is None or (role == "system" and at > 0):
            return [{"role": role, "content": server_prompt}, *messages]
        both = f"{server_prompt}\n\n{messages[at]['content']}"
        return [*messages[:at], {**messages[at], "content": both}, *messages[at + 1 :]]

    def _is_system_read(self) -> bool:
        """Some templates refuse system messages, others leave them out without a word."""
        user: list[Message] = [{"role": "user", "content": "Hello"}]
        system: Message = {"role": "system", "content": "Be kind."}
        try:
            return self._render([system, *user], None, None) != self._render(user, None, None)
        except InvalidPrompt:
            return False

    def _try_out(self) -> None:
        """Render a harmless conversation, to find at load what can be found then."""
        try:
            self._render([{"role": "user", "content": "Hello"}], None, None)
        except InvalidPrompt as exc:
            if isinstance(exc.__cause__, SecurityError | TemplateBudgetExceeded):
                raise ModelLoadError(
                    f"The model's chat template is not safe to use: {_short(exc.__cause__)}"
                ) from exc


def _compiled(source: str) -> jinja2.Template:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise ModelLoadError(
            f"The model's chat template has {len(source):,} characters; "
            f"at most {MAX_TEMPLATE_CHARS:,} are allowed."
        )
    try:
        return TemplateEnvironment().from_string(source)
    except (jinja2.TemplateError, TemplateBudgetExceeded, RecursionError) as exc:
        raise ModelLoadError(f"The model's chat template is broken: {_short(exc)}") from exc


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:_MAX_REFUSAL_CHARS]


def _plain_messages(messages: Sequence[Message]) -> list[Message]:
    if not messages:
        raise InvalidPrompt("There are no messages; send at least one.", param="messages")
    plain: list[Message] = []
    for number, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            raise InvalidPrompt(
                f"messages[{number}] has the role {str(role)[:40]!r}; allowed are "
                f"{', '.join(ROLES)}.",
                param="messages",
            )
        fields = dict(message)
        fields["role"] = "system" if role == "developer" else str(role)
        fields["content"] = _content_text(message.get("content"), number)
        if message.get("tool_calls"):
            fields["tool_calls"] = _tool_calls(message["tool_calls"], number)
        plain.append(fields)
    return plain


def _check_continues(messages: Sequence[Message]) -> None:
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        what = "calls tools" if last.get("tool_calls") else f"is of the role {last['role']}"
        raise InvalidPrompt(
            "continue_final_message goes on with the last message, so that must be a text of the "
            f"assistant; here it {what}.",
            param="continue_final_message",
        )


def _up_to_end_mark(text: str) -> str:
    before, found, _ = text.rpartition(END_MARK)
    if not found:
        raise InvalidPrompt(
            "The model's chat template does not write the last message, so it cannot be continued.",
            param="continue_final_message",
        )
    return before.replace(END_MARK, "")


def _content_text(content: Any, number: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        texts = []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            text = part.get("text") if isinstance(part, Mapping) else None
            if kind != "text" or not isinstance(text, str):
                raise InvalidPrompt(
                    f"messages[{number}] has a content part of the type {str(kind)[:40]!r}; "
                    "this model takes text only.",
                    param="messages",
                )
            texts.append(text)
        return "\n".join(texts)
    raise InvalidPrompt(
        f"messages[{number}] has a content that is neither a text nor a list of text parts.",
        param="messages",
    )


def _tool_calls(calls: Any, number: int) -> list[dict[str, Any]]:
    """Arguments come as JSON in a text; templates expect the object itself."""
    try:
        decoded = []
        for call in calls:
            function = dict(call["function"])
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"] or "{}")
            decoded.append({**call, "function": function})
    except (KeyError, TypeError, ValueError) as exc:
        raise InvalidPrompt(
            f"messages[{number}] has tool calls that cannot be read.", param="messages"
        ) from exc
    return decoded
