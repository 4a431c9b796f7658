"""Tools: what a caller offers, how the loaded model is told, and which calls it wrote.

Each family of models writes calls in a form of its own, the one its template was trained with:
`hermes` (also Qwen) wraps JSON in `<tool_call>`, `llama3` and `mistral` answer with JSON alone. A
model whose template knows no tools is told in plain words to use the first form.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from appliance.api.call_form import CLOSE, OPEN, call_pieces, call_start
from appliance.api.schemas import ToolSpec
from appliance.errors import BadRequest
from appliance.serving.types import AnswerForm, ToolFormat

# What may stand before the JSON of the two other forms, if the vocabulary shows it at all.
_MARKS = {"llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
# A template walks through parameters one level a call.
_MAX_DEPTH = 32
_HELD_AT_END = re.compile(r"\s*(?:<(?:t(?:o(?:o(?:l(?:_(?:c(?:a(?:l(?:l)?)?)?)?)?)?)?)?)?)?\Z")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_INSTRUCTIONS = (
    "You may call these functions to answer the user:\n<tools>\n{tools}\n</tools>\n"
    'To call one, write its name and arguments as JSON: <tool_call>{{"name": "...", '
    '"arguments": {{...}}}}</tool_call>'
)

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    # JSON of an object.
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """What one request does with tools."""

    tool_format: ToolFormat
    tools: list[dict[str, Any]] = field(default_factory=list)
    # The answer begins with this, so that it is a call.
    answer_start: str = ""
    max_calls: int | None = None
    # What the answer goes on with then.
    form: AnswerForm | None = None

    @property
    def template_tools(self) -> tuple[dict[str, Any], ...]:
        return tuple(self.tools) if self.tool_format else ()

    def readers(self, num_choices: int) -> "list[CallReader]":
        return [CallReader(self) for _ in range(num_choices)] if self.tools else []


def tool_plan(
    tools: Sequence[ToolSpec], choice: Any, *, is_parallel: bool, tool_format: ToolFormat
) -> ToolPlan:
    """Raises BadRequest that names `tools` or `tool_choice`."""
    names = [tool.function.name for tool in tools]
    if len(set(names)) != len(names):
        raise BadRequest("Two tools have the same name.", param="tools")
    for at, tool in enumerate(tools):
        if not _is_shallow(tool.function.parameters):
            raise BadRequest(
                f"The parameters of a tool are nested deeper than {_MAX_DEPTH} levels.",
                param=f"tools[{at}].function.parameters",
            )
    forced = _forced_name(choice, names)
    if choice == "none" or not tools:
        return ToolPlan(tool_format=tool_format)
    described = [_template_tool(tool) for tool in tools]
    start, form = "", None
    if forced is not None:
        start = call_start(tool_format, forced)
        pieces = call_pieces(tool_format, described, name=forced, is_parallel=is_parallel)
        form = AnswerForm(kind="pieces", source=pieces, param="tools")
    return ToolPlan(
        tool_format=tool_format,
        tools=described,
        answer_start=start,
        form=form,
        max_calls=None if is_parallel else 1,
    )


def text_or_calls(plan: ToolPlan, form: AnswerForm) -> AnswerForm:
    """An answer of that form where the model calls none of the tools that it may call."""
    if plan.form is not None or not plan.tools:
        return plan.form or form
    calls = [
        call_start(plan.tool_format, ""),
        *call_pieces(plan.tool_format, plan.tools, name="", is_parallel=plan.max_calls is None),
    ]
    match form.kind:
        case "json_object":
            text: Any = {"schema": {"type": "object"}}
        case "json_schema" if isinstance(form.source, dict):
            text = {"schema": form.source}
        case "pieces":
            text = form.source
        case _:
            raise BadRequest(
                f"{form.param} of this kind cannot be combined with tools.", param=form.param
            )
    return AnswerForm(kind="pieces", source={"one_of": [text, calls]}, param=form.param)


def _forced_name(choice: Any, names: Sequence[str]) -> str | None:
    """The function that must be called; "" for any of them, None when none must be."""
    if choice in (None, "auto", "none"):
        return None
    if choice == "required":
        if not names:
            raise BadRequest(
                "tool_choice is required, but there are no tools.", param="tool_choice"
            )
        return names[0] if len(names) == 1 else ""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or choice.get("type") != "function":
        raise BadRequest(
            'tool_choice must be "none", "auto", "required", or '
            '{"type": "function", "function": {"name": ...}}.',
            param="tool_choice",
        )
    if name not in names:
        raise BadRequest(
            f"tool_choice names the function {name[:64]!r}, which is not among the tools.",
            param="tool_choice",
        )
    return name


def _template_tool(tool: ToolSpec) -> dict[str, Any]:
    function = tool.function
    return {
        "type": "function",
        "function": {
            "name": function.name,
            "description": function.description or "",
            "parameters": function.parameters or {"type": "object", "properties": {}},
        },
    }


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return True
    return False


# ---- messages


def tool_messages(messages: Sequence[Message], plan: ToolPlan) -> list[Message]:
    """The messages as the loaded model's template can write them."""
    if plan.tool_format:
        return _named(messages, short_ids=plan.tool_format == "mistral")
    written: list[Message] = []
    for message in messages:
        if message.get("tool_calls"):
            calls = "\n".join(_call_text(call) for call in message["tool_calls"])
            text = f"{message['content']}\n{calls}".strip()
            written.append({"role": "assistant", "content": text})
        elif message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if written and written[-1].get("is_tool_answer"):
                text = f"{written.pop()['content']}\n{text}"
            written.append({"role": "user", "content": text, "is_tool_answer": True})
        else:
            written.append(message)
    plain = [{key: m[key] for key in m if key != "is_tool_answer"} for m in written]
    return _with_instructions(plain, plan.tools)


def _named(messages: Sequence[Message], *, short_ids: bool) -> list[Message]:
    """Tool answers get the name of the function that they answer: some templates write it."""
    names: dict[str, str] = {}
    named: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls") or []
        names.update({call["id"]: call["function"]["name"] for call in calls})
        changed = dict(message)
        if calls and short_ids:
            changed["tool_calls"] = [{**call, "id": _short_id(call["id"])} for call in calls]
        if message["role"] == "tool":
            call_id = message["tool_call_id"]
            if call_id in names:
                changed["name"] = names[call_id]
            changed["tool_call_id"] = _short_id(call_id) if short_ids else call_id
        named.append(changed)
    return named


def _short_id(call_id: str) -> str:
    """Mistral's templates take nine letters or digits only; the end is what differs."""
    kept = "".join(letter for letter in call_id if letter.isascii() and letter.isalnum())
    return kept[-9:].rjust(9, "0")


def _call_text(call: Mapping[str, Any]) -> str:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    return f'{OPEN}{{"name": {json.dumps(name)}, "arguments": {arguments or "{}"}}}{CLOSE}'


def _with_instructions(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    if not tools:
        return messages
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(tools=lines)
    if messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


# ---- calls in an answer


class CallReader:
    """Takes the text of one answer as it comes and tells calls from what is to be shown.

    A call is given when it is complete. What only looks like a call is shown as it was written.
    """

    def __init__(self, plan: ToolPlan) -> None:
        self._format = plan.tool_format or "hermes"
        self._names = frozenset(tool["function"]["name"] for tool in plan.tools)
        self._max_calls = plan.max_calls
        self._held = plan.answer_start
        self._is_in_call = False
        self._is_plain = False
        self.num_calls = 0

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """What can be shown now, and calls that are complete."""
        self._held += text
        return self._feed_wrapped(is_end=False) if self._format == "hermes" else self._feed_bare()

    def finish(self) -> tuple[str, list[ToolCall]]:
        """No more text comes."""
        shown, calls = (
            self._feed_wrapped(is_end=True) if self._format == "hermes" else self._feed_bare()
        )
        held, self._held = self._held, ""
        is_call = self._is_in_call if self._format == "hermes" else not self._is_plain
        found = self._calls(held) if is_call else None
        if found is not None:
            return shown, calls + found
        if self._is_in_call:
            held = OPEN + held
        # White space between or behind calls is no text.
        return shown + ("" if self.num_calls and not held.strip() else held), calls

    def _feed_wrapped(self, *, is_end: bool) -> tuple[str, list[ToolCall]]:
        shown, calls = "", []
        while True:
            if self._is_in_call:
                at = _end_of_call(self._held, is_end=is_end)
                if at < 0:
                    return shown, calls
                body, rest = self._held[:at], self._held[at + len(CLOSE) :]
                found = self._calls(body)
                calls += found or []
                shown += OPEN + body + CLOSE if found is None else ""
                self._held, self._is_in_call = rest, False
                continue
            before, opened, rest = self._held.partition(OPEN)
            if opened:
                shown += before.rstrip()
                self._held, self._is_in_call = rest, True
                continue
            held_at = _HELD_AT_END.search(self._held)
            at = held_at.start() if held_at else len(self._held)
            shown, self._held = shown + self._held[:at], self._held[at:]
            return shown, calls

    def _feed_bare(self) -> tuple[str, list[ToolCall]]:
        start = self._held.lstrip()
        mark = _MARKS[self._format]
        if not self._is_plain and start:
            self._is_plain = start[0] not in "{[" and not (
                start.startswith(mark) or mark.startswith(start)
            )
        if not self._is_plain:
            return "", []
        shown, self._held = self._held, ""
        return shown, []

    def _calls(self, text: str) -> list[ToolCall] | None:
        """Calls in the JSON of `text`; None unless all of it is calls of offered functions."""
        text = text.strip().removeprefix(_MARKS.get(self._format, ""))
        entries = _json_values(text)
        if not entries:
            # Small models forget the last brackets, once the arguments are closed.
            mended = (_json_values(text + end) for end in ("}", "}]", "]"))
            entries = next((found for found in mended if found and _has_arguments(found[-1])), [])
        calls = [self._call(entry) for entry in entries]
        found = [call for call in calls if call is not None]
        if not found or len(found) != len(calls):
            return None
        if self._max_calls is not None:
            found = found[: self._max_calls - self.num_calls]
        self.num_calls += len(found)
        return found

    def _call(self, entry: Any) -> ToolCall | None:
        if isinstance(entry, dict) and isinstance(entry.get("function"), dict):
            entry = entry["function"]
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return None
        arguments = entry.get("arguments", entry.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = next(iter(_json_values(arguments)), None)
        if not isinstance(arguments, dict):
            return None
        text = _strict_json(arguments)
        return None if text is None else ToolCall(self._new_id(), name, text)

    def _new_id(self) -> str:
        return secrets.token_hex(5)[:9] if self._format == "mistral" else _long_id()


def _end_of_call(text: str, *, is_end: bool) -> int:
    """Where the mark behind a call stands in `text`, -1 where it does not yet. An argument may hold
    the same letters; only in JSON that is broken at the end of the answer they are taken as it."""
    at = text.find(CLOSE)
    while at >= 0 and '"' in _STRING.sub("", text[:at]):
        at = text.find(CLOSE, at + 1)
    return text.find(CLOSE) if at < 0 and is_end else at


def arguments_json(arguments: Any, param: str) -> str:
    """Arguments of a call that a caller sent, as JSON text. Raises BadRequest with `param`."""
    if not _is_shallow(arguments):
        raise BadRequest(
            f"The arguments of a tool call are nested deeper than {_MAX_DEPTH} levels.", param=param
        )
    return orjson.dumps(arguments).decode()


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _has_arguments(entry: Any) -> bool:
    return isinstance(entry, dict) and ("arguments" in entry or "parameters" in entry)


def _strict_json(arguments: dict[str, Any]) -> str | None:
    """None for what Python's reader takes and others do not: NaN, halves of characters, depth."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        orjson.loads(text)
    except (ValueError, RecursionError):
        return None
    return text


def _json_values(text: str) -> list[Any]:
    """The values in `text`, lists taken apart, between them blanks, commas or semicolons."""
    decoder = json.JSONDecoder(strict=False)
    values: list[Any] = []
    at = 0
    try:
        while at < len(text):
            if text[at] in " \t\r\n,;":
                at += 1
                continue
            value, at = decoder.raw_decode(text, at)
            values += value if isinstance(value, list) else [value]
    except (ValueError, RecursionError):
        return []
    return values
