"""What a caller says an answer must look like, in the product's words."""

from typing import Any

from appliance.api.schemas import ResponseFormat, StructuredOutputs
from appliance.errors import BadRequest
from appliance.serving.types import AnswerForm

_MAX_CHOICES = 1000


def answer_form(
    response_format: ResponseFormat | None,
    structured: StructuredOutputs | None,
    *,
    param: str = "response_format",
) -> AnswerForm | None:
    """None for plain text. `param`: what the caller calls `response_format`.

    Raises:
        BadRequest: that names the field.
    """
    form = _of_format(response_format, param)
    if structured is None:
        return form
    if form is not None:
        raise BadRequest(f"Give either {param} or structured_outputs.", param="structured_outputs")
    return _of_structured(structured)


def ollama_format(value: Any) -> dict[str, Any] | None:
    """Ollama's `format`, as a `response_format`."""
    if value in (None, ""):
        return None
    if value == "json":
        return {"type": "json_object"}
    if isinstance(value, dict):
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": value}}
    raise BadRequest('format must be "json" or a JSON schema.', param="format")


def _of_format(asked: ResponseFormat | None, param: str) -> AnswerForm | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return AnswerForm(kind="json_object", param=param)
    if asked.type != "json_schema":
        raise BadRequest(
            f"{param} has the type {asked.type[:50]!r}; allowed are text, json_object and "
            "json_schema.",
            param=param,
        )
    found = asked.json_schema
    if found is None or found.schema_ is None:
        raise BadRequest(f"{param} has the type json_schema, but no schema.", param=param)
    return AnswerForm(kind="json_schema", source=found.schema_, param=param)


def _of_structured(asked: StructuredOutputs) -> AnswerForm | None:
    param = "structured_outputs"
    given = {
        name: value
        for name in ("json_", "regex", "choice", "grammar", "json_object")
        if (value := getattr(asked, name)) not in (None, False)
    }
    if len(given) > 1:
        names = ", ".join(name.rstrip("_") for name in given)
        raise BadRequest(f"structured_outputs has {names}; give one of them.", param=param)
    match given:
        case {"json_": str() as text}:
            return AnswerForm(kind="json_schema", source=text, param=param)
        case {"json_": schema}:
            return AnswerForm(kind="json_schema", source=schema, param=param)
        case {"regex": pattern}:
            return AnswerForm(kind="regex", source=pattern, param=param)
        case {"grammar": grammar}:
            return AnswerForm(kind="lark", source=grammar, param=param)
        case {"json_object": True}:
            return AnswerForm(kind="json_object", param=param)
        case {"choice": choices}:
            if not 1 <= len(choices) <= _MAX_CHOICES or not all(choices):
                raise BadRequest(
                    f"structured_outputs.choice needs 1 to {_MAX_CHOICES} texts that are not "
                    "empty.",
                    param=param,
                )
            return AnswerForm(kind="pieces", source={"one_of": choices}, param=param)
        case _:
            return None
