"""What is written or drawn can be seen: the contrast of the colour tokens, after WCAG 2.2."""

import re
from pathlib import Path

import pytest

TOKENS = Path(__file__).resolve().parents[2] / "static" / "css" / "tokens.css"
PLANES = ("bg", "surface", "sunken", "raised")
USERS = tuple(f"user-{number}" for number in range(1, 9))

TEXT, SHAPE = 4.5, 3.0
# ratio, foreground, background
PAIRS = (
    *((TEXT, ink, plane) for ink in ("text", "text-2", "text-3") for plane in PLANES),
    *((TEXT, state, plane) for state in ("ok", "warn", "danger", "info") for plane in PLANES),
    *((TEXT, state, f"{state}-soft") for state in ("ok", "warn", "danger", "info")),
    *((TEXT, "text-2", f"{state}-soft") for state in ("ok", "warn", "danger", "info")),
    *((TEXT, "accent", plane) for plane in ("bg", "surface", "raised", "accent-soft")),
    (TEXT, "text", "bubble"),
    (TEXT, "on-accent", "accent"),
    (TEXT, "on-accent", "accent-strong"),
    (TEXT, "on-danger", "danger-fill"),
    (TEXT, "plot-limit", "surface"),
    (TEXT, "plot-line-2", "surface"),
    *((TEXT, f"code-{part}", "code-bg") for part in ("key", "str", "com", "num")),
    *((SHAPE, "focus", plane) for plane in PLANES),
    *((SHAPE, "line-strong", plane) for plane in ("surface", "bg")),
    *((SHAPE, mark, "surface") for mark in (*USERS, "block-shared", "block-cached", "plot-line")),
)


def blocks() -> list[dict[str, str]]:
    """The tokens of light, of dark by the system, and of dark by choice."""
    text = re.sub(r"/\*.*?\*/", "", TOKENS.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = [
        dict(re.findall(r"--([\w-]+):\s*([^;]+);", body))
        for body in re.findall(r":root[^{]*\{([^}]*)\}", text)
    ]
    return [tokens for tokens in found if "text" in tokens]


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_measure_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_dark_is_the_same_by_the_system_and_by_choice() -> None:
    _, system, choice = blocks()
    assert system == choice


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_what_is_written_or_drawn_stands_out(theme: str) -> None:
    light, dark, _ = blocks()
    tokens = light if theme == "light" else light | dark
    faint = [
        f"{front} on {back}: {contrast(tokens[front], tokens[back]):.2f}, not {least}"
        for least, front, back in PAIRS
        if contrast(tokens[front], tokens[back]) < least
    ]
    assert not faint
