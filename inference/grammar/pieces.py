"""An answer put together from fixed text and schemas, as a Lark grammar.

A piece is a text, a list of pieces in order, or one of

    {"schema": JSON schema, "lenient": bool}   JSON of that schema
    {"one_of": [piece, ...]}
    {"up_to": number, "of": piece}             none, or as many as that

Owner: whichever thread compiles. The rules of a piece stand before the rule that uses them.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

JsonOptions = Callable[[bool], Mapping[str, Any]]


def lark_of(piece: Any, json_options: JsonOptions, refused: Callable[[str], Exception]) -> str:
    """Args:
        json_options: what the library is told about JSON, given whether a schema is lenient.
        refused: makes the error for what is no piece.

    Raises:
        InvalidConstraint: as `refused` made it.
    """
    rules: list[str] = []

    def rule(body: str) -> str:
        rules.append(f"r{len(rules)}: {body}")
        return f"r{len(rules) - 1}"

    def of(piece: Any) -> str:
        match piece:
            case str():
                return json.dumps(piece)
            case [_, *_]:
                return rule(" ".join(of(part) for part in piece))
            case {"schema": dict() as schema}:
                options = dict(json_options(bool(piece.get("lenient"))))
                return rule(f"%json {json.dumps({**schema, 'x-guidance': options})}")
            case {"one_of": [_, *_] as choices}:
                return rule(" | ".join(of(choice) for choice in choices))
            case {"up_to": int() as most, "of": inner}:
                return rule(f"({of(inner)}){{0,{most}}}")
            case _:
                raise refused("holds what is no part of an answer")

    start = of(piece)
    return "\n".join([f"start: {start}", *rules])
