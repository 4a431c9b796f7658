"""How a call of a tool is written in each family's form, for answers that must be calls."""

from collections.abc import Sequence
from typing import Any

from appliance.serving.types import ToolFormat

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# Before the name, between name and arguments, behind the arguments, between two calls, at the end.
_FORMS = {
    "hermes": (
        f'{OPEN}\n{{"name": "',
        '", "arguments": ',
        f"}}\n{CLOSE}",
        f'\n{OPEN}\n{{"name": "',
        "",
    ),
    "llama3": ('{"name": "', '", "parameters": ', "}", "", ""),
    "mistral": ('[TOOL_CALLS][{"name": "', '", "arguments": ', "}", ', {"name": "', "]"),
}
# Calls behind the first: a model that goes round in circles stops some time.
_MAX_MORE_CALLS = 15
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}

Tool = dict[str, Any]


def call_start(tool_format: ToolFormat, name: str) -> str:
    """What every call begins with; with the one function's name, if there is only one."""
    before, after, *_ = _FORMS[tool_format or "hermes"]
    return f"{before}{name}{after}" if name else before


def call_pieces(
    tool_format: ToolFormat, tools: Sequence[Tool], *, name: str, is_parallel: bool
) -> list[Any]:
    """What may follow `call_start`, in the pieces of `AnswerForm`.

    Args:
        name: the function that is called, once; "" for any of `tools`, and several calls where the
            form knows them and `is_parallel`.
    """
    _, after, behind, between, end = _FORMS[tool_format or "hermes"]
    if name:
        [tool] = [tool for tool in tools if tool["function"]["name"] == name]
        return [_arguments(tool), behind + end]
    any_call = [
        {
            "one_of": [[tool["function"]["name"] + after, _arguments(tool)] for tool in tools],
        },
        behind,
    ]
    pieces: list[Any] = [any_call]
    if is_parallel and between:
        pieces.append({"up_to": _MAX_MORE_CALLS, "of": [between, any_call]})
    return [*pieces, end] if end else pieces


def _arguments(tool: Tool) -> dict[str, Any]:
    """Keywords of a schema that cannot be followed are left out: the caller checks anyway."""
    parameters = tool["function"]["parameters"]
    takes_any = parameters.keys() <= {"type", "properties"} and not parameters.get("properties")
    return {"schema": _NO_ARGUMENTS if takes_any else parameters, "lenient": True}
