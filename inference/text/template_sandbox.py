"""The Jinja environment of chat templates: no way out, bounded time and memory. No torch.

A template comes with a model and is not trusted. Jinja's immutable sandbox keeps it from Python's
insides; what is here keeps it from running on and from building huge texts.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDER_CPU_S = 2.0
MAX_TEXT_CHARS = 8_000_000
_MAX_INT_BITS = 4_096
_TEMPLATE_FILE = "<template>"
_REMOVED_FILTERS = ("center", "format", "batch", "slice", "random", "urlize", "pprint")
_TEXT_METHODS = frozenset(
    """capitalize casefold count endswith find index isalnum isalpha isdecimal isdigit islower
    isnumeric isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace
    rfind rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title
    upper""".split()  # noqa: SIM905 - one name a line would be thirty lines
)


class TemplateRefusal(jinja2.TemplateError):
    """The template itself called `raise_exception`: these messages are not for it."""


class TemplateBudgetExceeded(Exception):
    """The template ran too long or made too large a text."""


class _Budget(threading.local):
    chars_left = MAX_TEXT_CHARS


_budget = _Budget()


@contextmanager
def bounded_rendering() -> Iterator[None]:
    """Bounds what template code does in this thread: processor time, and characters put out."""
    _budget.chars_left = MAX_TEXT_CHARS
    deadline = time.thread_time() + MAX_RENDER_CPU_S

    def on_line(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if time.thread_time() > deadline:
            raise TemplateBudgetExceeded("it runs too long")
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        return on_line if frame.f_code.co_filename == _TEMPLATE_FILE else None

    # A loop in a template may call nothing of ours, so its lines are watched; other code is not.
    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)


def _check_size(num_chars: int) -> None:
    if num_chars > MAX_TEXT_CHARS:
        raise TemplateBudgetExceeded("it makes too large a text")


def _put_out(value: Any) -> Any:
    """Called for every value that a template puts out."""
    _budget.chars_left -= len(str(value))
    if _budget.chars_left < 0:
        raise TemplateBudgetExceeded("it makes too large a text")
    return value


def _bounded_concat(parts: Iterable[str]) -> str:
    """Joins what a template, block or macro puts out."""
    kept = []
    num_chars = 0
    for part in parts:
        num_chars += len(part)
        _check_size(num_chars)
        kept.append(part)
    return "".join(kept)


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks the assistant's text for training; here it only passes it on."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Sandbox with the globals and filters that chat templates expect."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(_bounded_concat)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_put_out,
            extensions=[jinja2.ext.loopcontrols, _GenerationTag],
            cache_size=0,
        )
        self.globals.pop("lipsum", None)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        for name, function in (
            ("tojson", _to_json),
            ("replace", _replace_filter),
            ("join", _join_filter),
            ("indent", _indent_filter),
        ):
            self.filters[name] = function

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        # `a ~ b` is compiled to a plain join that nothing can bound; the filter can.
        tree = super()._parse(source, name, filename)
        return _ConcatToJoin().visit(tree)  # type: ignore[no-any-return]

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"{attribute!r} of a {type(obj).__name__} is out of bounds")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_size(len(left) + len(right))
        elif operator == "*":
            _check_product(left, right)
        elif operator == "**":
            bits = left.bit_length() if isinstance(left, int) else 1
            if isinstance(right, int) and bits * abs(right) > _MAX_INT_BITS:
                raise TemplateBudgetExceeded("it computes too large a number")
        elif operator == "%" and isinstance(left, str):
            raise SecurityError("printf-style formatting is not available")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The sandbox wraps str.format in a function of its own.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            _check_text_method(owner, __obj.__name__, args)
        return super().call(__context, __obj, *args, **kwargs)


class _ConcatToJoin:
    """Replaces every `a ~ b` of a syntax tree by `[a, b] | join`."""

    def visit(self, node: nodes.Node) -> Any:
        for field, value in list(node.iter_fields()):
            if isinstance(value, nodes.Node):
                setattr(node, field, self.visit(value))
            elif isinstance(value, list):
                value[:] = [self.visit(v) if isinstance(v, nodes.Node) else v for v in value]
        if not isinstance(node, nodes.Concat):
            return node
        items = nodes.List(node.nodes, lineno=node.lineno, environment=node.environment)
        return nodes.Filter(
            items, "join", [], [], None, None, lineno=node.lineno, environment=node.environment
        )


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_INT_BITS:
            raise TemplateBudgetExceeded("it computes too large a number")
        return
    for sequence, times in ((left, right), (right, left)):
        if hasattr(sequence, "__len__") and isinstance(times, int):
            _check_size(len(sequence) * max(times, 0))


def _check_text_method(text: str, name: str, args: tuple[Any, ...]) -> None:
    if name not in _TEXT_METHODS:
        raise SecurityError(f"the text method {name} is not available")
    if name == "replace" and len(args) >= 2:
        _check_replacement(text, str(args[0]), str(args[1]))
    elif name == "join" and args:
        _check_join(text, args[0])


def _check_replacement(text: str, old: str, new: str) -> None:
    _check_size(len(text) + (str.count(text, old) if old else len(text) + 1) * len(new))


def _check_join(separator: str, values: Any) -> None:
    if hasattr(values, "__len__"):
        _check_size(
            len(separator) * len(values) + sum(len(v) for v in values if isinstance(v, str))
        )


def _replace_filter(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text = value if isinstance(value, str) else str(value)
    _check_replacement(text, str(old), str(new))
    return text.replace(str(old), str(new), -1 if count is None else count)


def _join_filter(value: Any, separator: str = "", attribute: str | int | None = None) -> str:
    items = list(value)
    if attribute is not None:
        items = [
            item[attribute] if isinstance(item, dict) else _plain_attribute(item, str(attribute))
            for item in items
        ]
    texts = [str(item) for item in items]
    _check_join(separator, texts)
    return str(separator).join(texts)


def _plain_attribute(item: Any, name: str) -> Any:
    raise SecurityError(f"join by the attribute {name} of a {type(item).__name__}")


def _indent_filter(
    value: str, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    pad = width if isinstance(width, str) else " " * min(int(width), 64)
    lines = str(value).split("\n")
    _check_size(len(value) + len(pad) * len(lines))
    padded = [pad + line if n or first else line for n, line in enumerate(lines)]
    return "\n".join(
        done if blank or line or not n else line
        for n, (done, line) in enumerate(zip(padded, lines, strict=True))
    )


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: characters as they are, nothing escaped for HTML."""
    if indent is not None:
        indent = min(int(indent), 16)
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    _check_size(len(text))
    return text


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(str(layout)[:100])
