from datetime import timedelta

from django import forms

from appliance.accounts.models import User
from appliance.api_keys.services import key_rules

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
