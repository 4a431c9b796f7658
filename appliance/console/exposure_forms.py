"""What an admin types on the exposure page; the checks themselves are the exposure app's."""

from collections.abc import Mapping
from typing import Any

from django import forms

from appliance.errors import ApplianceError
from appliance.exposure.models import ExposureSettings

# Words for scripts that say nothing beside a field.
_FOR_SCRIPTS = {
    "allowed_hosts has ": "",
    "allowed_networks has ": "",
    "trusted_proxies has ": "",
    "bind_host is ": "",
    "port is ": "",
}


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
        message = exc.message
        for prefix, instead in _FOR_SCRIPTS.items():
            if message.startswith(prefix):
                message = instead + message.removeprefix(prefix)
        self.add_error(exc.param if exc.param in self.fields else None, message)


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
        help_text="Empty: everybody who arrives if only this machine is listened to, else all "
        "private networks.",
        placeholder="10.20.0.0/16",
    )
    trusted_proxies = LinesField(
        label="Proxies",
        help_text="Their word about a caller's address and TLS is believed. Empty: nobody's.",
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
        help_text="127.0.0.1 for this machine only, 0.0.0.0 or :: for all its addresses, or one.",
        widget=forms.TextInput(attrs={"class": "input mono", "spellcheck": "false"}),
    )
    port = forms.IntegerField(
        label="Port",
        min_value=1,
        max_value=65535,
        help_text="1 to 65535. Below 1024 needs a privilege.",
        widget=forms.TextInput(attrs={"class": "input mono", "inputmode": "numeric"}),
    )

    @staticmethod
    def values_of(row: ExposureSettings) -> Mapping[str, Any]:
        return {"bind_host": row.bind_host, "port": row.port}
