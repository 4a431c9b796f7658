"""Sign-in, one-time links, and the members page. What changes an account is in services."""

from typing import Any
from urllib.parse import urlsplit

from allauth.account.views import LoginView, LogoutView
from allauth.core import ratelimit
from django.contrib import messages
from django.contrib.auth import login, update_session_auth_hash
from django.contrib.auth.decorators import login_not_required
from django.core.exceptions import ValidationError
from django.forms import Form
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters, sensitive_variables
from django.views.decorators.http import require_http_methods, require_POST

from appliance.accounts.access import admin_required
from appliance.accounts.forms import (
    ChangePasswordForm,
    ChoosePasswordForm,
    MemberAddForm,
    SetUpForm,
    SignInForm,
)
from appliance.accounts.models import OneTimeLink, User
from appliance.accounts.selectors import members
from appliance.accounts.services import (
    invite_link_create,
    invite_link_use,
    link_find,
    setup_link_use,
    user_create,
    user_set_active,
    user_set_admin,
    user_set_password,
)
from appliance.errors import ApplianceError, NotFound

SIGN_IN_BACKEND = "appliance.accounts.sign_in.SignInBackend"


class SignIn(LoginView):
    """Sign-in; where nobody has an account yet, the page says how to make the first."""

    form_class = SignInForm

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        return {**super().get_context_data(**kwargs), "is_new": not User.objects.exists()}


sign_in = SignIn.as_view()
sign_out = login_not_required(require_POST(LogoutView.as_view()))


# ---- one-time links


@login_not_required
@never_cache
@sensitive_post_parameters("password")
@require_http_methods(["GET", "POST"])
def set_up(request: HttpRequest, token: str) -> HttpResponse:
    """The first admin chooses a name and a password; then they are signed in."""
    try:
        link = link_find(token, setup=True)
        form = SetUpForm(request.POST or None)
        if request.method == "POST" and form.is_valid():
            user = _use(form, link)
            if user is not None:
                login(request, user, backend=SIGN_IN_BACKEND)
                return redirect("/")
    except NotFound as exc:
        return _link_dead(request, exc)
    return render(request, "accounts/set_up.html", {"form": form})


@login_not_required
@never_cache
@sensitive_post_parameters("password")
@require_http_methods(["GET", "POST"])
def use_invite(request: HttpRequest, token: str) -> HttpResponse:
    """A member chooses a password; then they are signed in."""
    try:
        link = link_find(token, setup=False)
        form = ChoosePasswordForm(request.POST or None, user=link.user)
        if request.method == "POST" and form.is_valid():
            user = _use(form, link)
            if user is not None:
                login(request, user, backend=SIGN_IN_BACKEND)
                return redirect("/")
    except NotFound as exc:
        return _link_dead(request, exc)
    return render(request, "accounts/invite.html", {"form": form, "link": link})


@sensitive_variables("password")
def _use(form: Form, link: OneTimeLink) -> User | None:
    password = form.cleaned_data["password"]
    try:
        if link.kind == OneTimeLink.Kind.SETUP:
            return setup_link_use(link, username=form.cleaned_data["username"], password=password)
        return invite_link_use(link, password=password)
    except ValidationError as exc:
        form.add_error(None, exc)
        return None


def _link_dead(request: HttpRequest, exc: NotFound) -> HttpResponse:
    return render(request, "accounts/link_dead.html", {"reason": exc.message}, status=404)


# ---- the members page


@admin_required
@never_cache
@require_http_methods(["GET", "POST"])
def users(request: HttpRequest) -> HttpResponse:
    """List members; a POST adds one and shows their sign-in link once."""
    form = MemberAddForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            user = user_create(
                form.cleaned_data["username"],
                is_admin=form.cleaned_data["role"] == "admin",
                by=request.user,
            )
        except ApplianceError as exc:
            form.add_error("username", exc.message)
        except ValidationError as exc:
            form.add_error("username", exc.messages[0])
        else:
            return _users_page(request, link=_full_link(request, user), link_user=user)
    return _users_page(request, form=form)


@admin_required
@never_cache
@require_POST
def user_action(request: HttpRequest, user_id: int, action: str) -> HttpResponse:
    """One change to one member: its outcome is a message over the members page."""
    user = get_object_or_404(User, pk=user_id)
    try:
        if action == "link":
            return _users_page(request, link=_full_link(request, user), link_user=user)
        if action in ("make-admin", "take-admin"):
            user_set_admin(user, action == "make-admin", by=request.user)
        else:
            user_set_active(user, action == "activate", by=request.user)
    except ApplianceError as exc:
        messages.error(request, exc.message)
    else:
        messages.success(request, _DONE[action].format(name=user.username))
    return redirect("users") if request.user != user else redirect("account")


_DONE = {
    "make-admin": "{name} is an admin now.",
    "take-admin": "{name} is a member now, no longer an admin.",
    "activate": "{name} can sign in again.",
    "deactivate": "{name} can no longer sign in. Their API keys are refused from now on.",
}


def _full_link(request: HttpRequest, user: User) -> str:
    return request.build_absolute_uri(invite_link_create(user, by=request.user))


def _users_page(
    request: HttpRequest,
    *,
    form: MemberAddForm | None = None,
    link: str = "",
    link_user: User | None = None,
) -> HttpResponse:
    context = {
        "section": "users",
        "members": members(),
        "form": form or MemberAddForm(),
        "link": link,
        "link_is_local": urlsplit(link).hostname in ("localhost", "127.0.0.1", "::1"),
        "link_user": link_user,
    }
    status = 400 if form is not None and form.errors else 200
    return render(request, "accounts/users.html", context, status=status)


# ---- own password


@never_cache
@sensitive_post_parameters("old_password", "password")
@require_http_methods(["GET", "POST"])
def change_password(request: HttpRequest) -> HttpResponseBase:
    """Change the own password; every other browser of theirs is signed out by it."""
    user = User.objects.get(pk=request.user.pk)
    if request.method == "POST":
        allowed = ratelimit.consume(request, action="change_password", user=user)
        if not allowed:
            return ratelimit.respond_429(request)
    form = ChangePasswordForm(request.POST or None, user=user)
    if request.method == "POST" and form.is_valid():
        user_set_password(user, form.cleaned_data["password"])
        update_session_auth_hash(request, user)
        messages.success(request, "Your password is changed. Your other browsers are signed out.")
        return redirect(reverse("account"))
    return render(request, "accounts/password.html", {"form": form})
