from datetime import timedelta

from django import forms

from appliance.accounts.models import User
from appliance.accounts.number_field import CountField
from appliance.api_keys.networks import networks_parse
from appliance.api_keys.services import key_rules
from appliance.errors import BadRequest

MAX_REQUESTS = 1_000_000
MAX_TOKENS = 10**15

LIVES = {"90": "90 days", "30": "30 days", "365": "1 year", "": "no end"}
MAY = {
    "chat,models": "generate, list models",
    "chat": "generate",
    "models": "list models",
}
ADMIN_MAY = {
    "chat,models,admin": "all, also run the engine",
    "admin": "run the engine",
}


OVERLAPS = {"0": "no time", "1": "hour", "24": "day", "168": "7 days", "720": "30 days"}


class KeyForm(forms.Form):
    name = forms.CharField(
        label="Name for a new key",
        max_length=80,
        widget=forms.TextInput(
            attrs={"class": "input", "placeholder": "What will use it?", "autocomplete": "off"}
        ),
    )
    scopes = forms.ChoiceField(label="It may", widget=forms.Select(attrs={"class": "select"}))
    expires = forms.ChoiceField(
        label="Ends after",
        required=False,
        choices=list(LIVES.items()),
        initial="90",
        widget=forms.Select(attrs={"class": "select"}),
    )

    def __init__(self, *args: object, owner: User, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        may = MAY | (ADMIN_MAY if owner.is_admin else {})
        self.fields["scopes"].choices = list(may.items())
        longest = key_rules().max_life_days
        if longest is not None:
            lives = {days: words for days, words in LIVES.items() if days and int(days) <= longest}
            lives.setdefault(str(longest), f"{longest:,} day{'' if longest == 1 else 's'}")
            self.fields["expires"].choices = list(lives.items())
            self.fields["expires"].initial = next(iter(lives))

    def clean_scopes(self) -> list[str]:
        return self.cleaned_data["scopes"].split(",")

    def clean_expires(self) -> timedelta | None:
        days = self.cleaned_data["expires"]
        return timedelta(days=int(days)) if days else None


class KeyLimitsForm(forms.Form):
    """Where and with what a key may be used, and how much of it."""

    models = forms.CharField(
        label="Models",
        required=False,
        max_length=4000,
        widget=forms.TextInput(
            attrs={"class": "input", "placeholder": "all", "spellcheck": "false"}
        ),
    )
    networks = forms.CharField(
        label="Networks",
        required=False,
        max_length=4000,
        widget=forms.TextInput(
            attrs={"class": "input", "placeholder": "from anywhere", "spellcheck": "false"}
        ),
    )
    requests_per_minute = CountField(
        label="Requests a minute", low=0, high=MAX_REQUESTS, required=False
    )
    tokens_per_day = CountField(label="Tokens a day", low=0, high=MAX_TOKENS, required=False)

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.fields["models"].help_text = "Names with commas. Empty: every model."
        self.fields["networks"].help_text = "Such as 10.0.0.0/8, 192.0.2.7. Empty: from anywhere."
        for name in ("requests_per_minute", "tokens_per_day"):
            self.fields[name].help_text = "Empty: as your own limits say."

    def clean_models(self) -> list[str]:
        return [name.strip() for name in self.cleaned_data["models"].split(",") if name.strip()]

    def clean_networks(self) -> list[str]:
        try:
            return networks_parse(self.cleaned_data["networks"])
        except BadRequest as exc:
            raise forms.ValidationError(exc.message) from exc


class RotateForm(forms.Form):
    overlap = forms.TypedChoiceField(
        label="The old secret opens for another",
        choices=list(OVERLAPS.items()),
        initial="24",
        coerce=lambda hours: timedelta(hours=int(hours)),
        widget=forms.Select(attrs={"class": "select"}),
    )
