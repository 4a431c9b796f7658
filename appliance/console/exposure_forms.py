"""What an admin types on the exposure page; the checks themselves are the exposure app's."""

from collections.abc import Mapping
from typing import Any

from django import forms

from appliance.errors import ApplianceError
from appliance.exposure.models import ExposureSettings


class LinesField(forms.CharField):
    """One entry a line, or several with commas; an empty field is no entry."""

    def __init__(self, *, label: str, help_text: str, placeholder: str) -> None:
        attrs = {
            "class": "textarea mono",
            "rows": 3,
            "placeholder": placeholder,
            "spellcheck": "false",
            "autocapitalize": "none",
        }
        super().__init__(
            label=label,
            help_text=help_text,
            required=False,
            max_length=30_000,
            widget=forms.Textarea(attrs=attrs),
        )

    def clean(self, value: Any) -> list[str]:
        text = super().clean(value)
        return [entry.strip() for entry in text.replace(",", "\n").splitlines() if entry.strip()]


class _ExposureForm(forms.Form):
    def add_reason(self, exc: ApplianceError) -> None:
        """Show a refusal at the field that it is about."""
        self.add_error(exc.param if exc.param in self.fields else None, exc.message)


class CallersForm(_ExposureForm):
    """What counts at once."""

    allowed_hosts = LinesField(
        label="Names",
        help_text="Under which people reach this server, one a line. This machine's own always "
        "work.",
        placeholder="blockhouse.example.com",
    )
    allowed_networks = LinesField(
        label="Networks that may call",
        help_text="One a line. Empty: all private networks; while the server listens to this "
        "machine only, every call that arrives.",
        placeholder="10.20.0.0/16",
    )
    trusted_proxies = LinesField(
        label="Proxies",
        help_text="Programs before this server that pass calls on, one a line. What they say of a "
        "caller's address and encryption is believed. Empty: nobody's word is.",
        placeholder="10.20.4.1",
    )

    @staticmethod
    def values_of(row: ExposureSettings) -> Mapping[str, str]:
        return {name: "\n".join(getattr(row, name)) for name in CallersForm.base_fields}


class AddressForm(_ExposureForm):
    """What the next start goes by."""

    bind_host = forms.CharField(
        label="Address",
        max_length=255,
        error_messages={"required": "Give an address to listen on."},
        help_text="127.0.0.1 for this machine only, 0.0.0.0 or :: for all its addresses, or one.",
        widget=forms.TextInput(attrs={"class": "input mono", "spellcheck": "false"}),
    )
    port = forms.IntegerField(
        label="Port",
        min_value=1,
        max_value=65535,
        help_text="1 to 65535; below 1024 only where the system lets the server.",
        error_messages=dict.fromkeys(
            ("required", "invalid", "min_value", "max_value"),
            "Give a whole number from 1 to 65535.",
        ),
        widget=forms.TextInput(attrs={"class": "input mono", "inputmode": "numeric"}),
    )

    @staticmethod
    def values_of(row: ExposureSettings) -> Mapping[str, Any]:
        return {"bind_host": row.bind_host, "port": row.port}
