import re
from typing import Any

from django import forms

_SEPARATORS = re.compile(r"[\s,_'’]")
_NUMBER = re.compile(r"(\d+)(?:\.(\d+))?([kM]?)", re.ASCII)
_UNITS = {"": 1, "k": 1_000, "M": 1_000_000}


class CountField(forms.CharField):
    """A whole number as people write it: `5,000,000`, `5 000 000`, `250k`, `1.5M`."""

    def __init__(self, *, label: str, low: int, high: int, required: bool = True) -> None:
        self.low, self.high = low, high
        super().__init__(
            label=label,
            required=required,
            max_length=40,
            widget=forms.TextInput(attrs={"class": "input", "inputmode": "text"}),
        )

    def clean(self, value: Any) -> int | None:
        text = super().clean(value)
        if not text:
            return None
        found = _NUMBER.fullmatch(_SEPARATORS.sub("", text))
        unit = _UNITS[found[3]] if found else 1
        fraction = found[2] or "" if found else ""
        if not found or 10 ** len(fraction) > unit:
            raise forms.ValidationError(
                f"“{text}” is no whole number. Write it like 5,000,000, 250k or 1.5M."
            )
        number = int(found[1] + fraction) * unit // 10 ** len(fraction)
        if not self.low <= number <= self.high:
            raise forms.ValidationError(f"{self.low:,} to {self.high:,} is allowed; got {text}.")
        return number
