from typing import Any

from allauth.account.forms import LoginForm
from django import forms
from django.contrib.auth.password_validation import validate_password

from appliance.accounts.models import User

NEW_HELP = "At least 8 characters; no common word, not only digits."
_NAME_ATTRS = {
    "class": "input",
    "autocomplete": "username",
    "autocapitalize": "none",
    "spellcheck": "false",
}


def password_field(label: str, *, autocomplete: str = "new-password") -> forms.CharField:
    return forms.CharField(
        label=label,
        strip=False,
        max_length=256,
        widget=forms.PasswordInput(attrs={"class": "input", "autocomplete": autocomplete}),
    )


class SignInForm(LoginForm):  # type: ignore[misc]
    """The log-in form with this product's words and looks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        login, password, remember = (self.fields[n] for n in ("login", "password", "remember"))
        login.label, password.label = "User name", "Password"
        login.widget.attrs = {**_NAME_ATTRS, "maxlength": 150}
        password.widget.attrs = {"class": "input", "autocomplete": "current-password"}
        password.help_text = ""
        remember.label = "Stay signed in on this device for 14 days"
        remember.initial = True


class ChoosePasswordForm(forms.Form):
    """For a one-time link: the user is known and chooses a password."""

    password = password_field("New password")

    def __init__(self, *args: Any, user: User | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.user = user
        self.fields["password"].help_text = NEW_HELP

    def clean_password(self) -> str:
        password: str = self.cleaned_data["password"]
        validate_password(password, self.user or User(username=self.data.get("username", "")))
        return password


class SetUpForm(ChoosePasswordForm):
    """The first admin chooses a name, too."""

    field_order = ["username", "password"]
    username = forms.CharField(
        label="User name",
        max_length=150,
        validators=[User.username_validator],
        widget=forms.TextInput(attrs=_NAME_ATTRS),
    )


class MemberAddForm(forms.Form):
    username = forms.CharField(
        label="User name of a new member",
        max_length=150,
        validators=[User.username_validator],
        widget=forms.TextInput(
            attrs={**_NAME_ATTRS, "autocomplete": "off", "placeholder": "As they will type it"}
        ),
    )
    role = forms.ChoiceField(
        label="Role",
        choices=[("member", "member"), ("admin", "admin")],
        widget=forms.Select(attrs={"class": "select"}),
    )


class ChangePasswordForm(ChoosePasswordForm):
    """Needs the password of now, so that a browser left open does not lose the account."""

    field_order = ["old_password", "password"]
    old_password = password_field("Password now", autocomplete="current-password")

    def clean_old_password(self) -> str:
        old: str = self.cleaned_data["old_password"]
        if self.user is None or not self.user.check_password(old):
            raise forms.ValidationError("This is not your password.")
        return old
