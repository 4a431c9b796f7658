"""Read and check a request's JSON body; every fault of it is a 400, 413 or 415 with a reason."""

import asyncio
from typing import Any, TypeVar

import orjson
import pydantic
from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest, UnreadablePostError

from appliance.api.envelope import JSON, UnsupportedMediaType
from appliance.errors import BadRequest, BodyTooLarge

Model = TypeVar("Model", bound=pydantic.BaseModel)

# Larger bodies are parsed in a thread: one of a megabyte takes milliseconds.
_ON_LOOP_BYTES = 32 * 1024

# pydantic's kinds of fault in plain words; the others keep pydantic's.
_WORDS = {
    "missing": "is missing",
    "too_short": "must not be empty",
    "too_long": "has too many entries",
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "finite_number": "must be a finite number",
}


async def body_read(request: HttpRequest, model: type[Model]) -> Model:
    """Raises BadRequest (with `param`), BodyTooLarge or UnsupportedMediaType."""
    # A form of another site can send any body, but not with this type.
    if request.content_type != JSON:
        raise UnsupportedMediaType(
            f"The Content-Type is {request.content_type[:100]!r}; send application/json."
        )
    try:
        raw = request.body
    except RequestDataTooBig as exc:
        raise BodyTooLarge("The request body is larger than this server allows.") from exc
    except UnreadablePostError as exc:
        raise BadRequest("The request body ended too early.") from exc
    if len(raw) <= _ON_LOOP_BYTES:
        return _parse(raw, model)
    return await asyncio.to_thread(_parse, raw, model)


def _parse(raw: bytes, model: type[Model]) -> Model:
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        raise BadRequest(f"The request body is not JSON: {exc}.") from exc
    if not isinstance(data, dict):
        raise BadRequest("The request body must be a JSON object.")
    return body_check(data, model)


def body_check(data: dict[str, Any], model: type[Model]) -> Model:
    """`data` as `model`. Raises BadRequest that names the first field at fault."""
    try:
        return model.model_validate(data)
    except pydantic.ValidationError as exc:
        raise _bad_field(exc) from exc


def _bad_field(exc: pydantic.ValidationError) -> BadRequest:
    """The first fault, in OpenAI's way of naming a place: `messages[0].content`."""
    error = exc.errors(include_url=False, include_input=False)[0]
    param = ""
    for step in error["loc"]:
        if isinstance(step, int):
            param += f"[{step}]"
        elif not _is_branch(step):
            param += f".{step}" if param else step
    message = _WORDS.get(error["type"]) or _lower(error["msg"])
    return BadRequest(f"{param or 'The body'} {message}.", param=param or None)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:].rstrip(".")


def _is_branch(step: str) -> bool:
    """Whether it names an alternative of a union ("str", "list[...]"), not a field."""
    return step in ("str", "int", "float", "bool") or not step.isidentifier()
