"""Users and one-time links: every change to an account goes through here."""

import hashlib
import secrets
from datetime import timedelta

from django.contrib.auth import SESSION_KEY
from django.contrib.auth.password_validation import validate_password
from django.contrib.sessions.models import Session
from django.db import IntegrityError, transaction
from django.db.models import Q
from django.utils import timezone

from appliance.accounts.acts import act_done
from appliance.accounts.models import OneTimeLink, User
from appliance.errors import BadRequest, Conflict, NotFound

INVITE_LIFE = timedelta(days=7)
SEEN_EVERY = timedelta(minutes=1)
_ADMINS = Q(is_staff=True) | Q(is_superuser=True)


# ---- users


def user_create(
    username: str,
    *,
    password: str | None = None,
    is_admin: bool = False,
    is_service: bool = False,
    by: User | None = None,
) -> User:
    """Make a user with the block-map mark that the fewest users have.

    Without a password nobody can sign in as this user until a one-time link is used; with
    `is_service` nobody ever can.
    Raises ValidationError for a name that is not allowed, Conflict for one that is taken.
    """
    assert not (is_service and (is_admin or password)), "a service account has no way in"
    username = User.normalize_username(username.strip())
    User(username=username).clean_fields(exclude={"password"})
    with transaction.atomic():
        # Names that differ only in case would be taken for one another.
        if User.objects.filter(username__iexact=username).exists():
            raise Conflict(f"The user name {username} is taken.", param="username")
        hue, shape = User.objects.next_mark()
        user = User(
            username=username,
            is_staff=is_admin,
            is_superuser=is_admin,
            is_service=is_service,
            mark_hue=hue,
            mark_shape=shape,
        )
        user.set_password(password)
        try:
            with transaction.atomic():
                user.save()
        except IntegrityError as exc:
            raise Conflict(f"The user name {username} is taken.", param="username") from exc
        if by is not None:
            action = "service.create" if is_service else "user.create"
            act_done(by, action, username, is_admin=is_admin)
    return user


def user_set_admin(user: User, is_admin: bool, *, by: User | None = None) -> None:
    """Raises Conflict when the last admin would be gone, or for a service account."""
    if is_admin and user.is_service:
        raise Conflict("A service account cannot be an admin: nobody signs in with it.")
    with transaction.atomic():
        if not is_admin:
            _keep_an_admin(user)
        user.is_staff = user.is_superuser = is_admin
        user.save(update_fields=["is_staff", "is_superuser"])
        act_done(by, "user.make_admin" if is_admin else "user.take_admin", user.username)


def user_set_active(user: User, is_active: bool, *, by: User | None = None) -> None:
    """Switch an account off or on. Off also ends its sessions, links and API keys' use.

    Raises Conflict when the last admin would be gone.
    """
    with transaction.atomic():
        if not is_active:
            _keep_an_admin(user)
            OneTimeLink.objects.filter(user=user, used_at=None).delete()
            _sessions_end(user)
        user.is_active = is_active
        user.save(update_fields=["is_active"])
        act_done(by, "user.activate" if is_active else "user.deactivate", user.username)


def _sessions_end(user: User) -> None:
    """Else they would go on where they were once the account is switched on again."""
    # The owner stands inside the signed data of each: a team has few, and this is rare.
    ended = [
        session.pk
        for session in Session.objects.iterator()
        if session.get_decoded().get(SESSION_KEY) == str(user.pk)
    ]
    Session.objects.filter(pk__in=ended).delete()


def _keep_an_admin(user: User) -> None:
    # Locks all admins' rows, so that two admins cannot remove each other at the same instant.
    admins = User.objects.select_for_update().filter(_ADMINS, is_active=True).order_by("pk")
    others = [admin for admin in admins if admin != user]
    if user.has_usable_password():
        # Who never chose one does not count: in seven days nobody could sign in any more.
        others = [admin for admin in others if admin.has_usable_password()]
    if user in admins and not others:
        raise Conflict(
            f"{user.username} is the last admin who can sign in. Make another member an admin "
            "first, one who has used their sign-in link.",
            param="user",
        )


def user_set_password(user: User, password: str) -> None:
    """Set it; every session made with the old one ends with its next request."""
    validate_password(password, user)
    user.set_password(password)
    user.save(update_fields=["password"])


def user_seen(user: User) -> None:
    """Note that the user is here; a write at most once a minute."""
    now = timezone.now()
    if user.last_seen_at is None or now - user.last_seen_at > SEEN_EVERY:
        User.objects.filter(pk=user.pk).update(last_seen_at=now)
        user.last_seen_at = now


# ---- one-time links


def setup_link_create() -> str:
    """The path where the first admin chooses a name and a password; an earlier one is void.

    Raises Conflict when there is a user already.
    """
    if User.objects.exists():
        raise Conflict("There is a user already: the first set-up is done.")
    with transaction.atomic():
        OneTimeLink.objects.filter(kind=OneTimeLink.Kind.SETUP).delete()
        token = _link_store(OneTimeLink.Kind.SETUP, user=None, life=None)
    return f"/setup/{token}/"


def invite_link_create(user: User, *, by: User | None = None) -> str:
    """The path where `user` chooses a password, open for 7 days; earlier ones are void.

    Raises Conflict for a service account.
    """
    if user.is_service:
        raise Conflict("A service account has no sign-in: it works with keys alone.")
    kind = OneTimeLink.Kind.RESET if user.has_usable_password() else OneTimeLink.Kind.INVITE
    with transaction.atomic():
        OneTimeLink.objects.filter(user=user, used_at=None).delete()
        token = _link_store(kind, user=user, life=INVITE_LIFE)
        if by is not None:
            act_done(by, "user.link", user.username)
    return f"/invite/{token}/"


def _link_store(kind: OneTimeLink.Kind, *, user: User | None, life: timedelta | None) -> str:
    token = secrets.token_urlsafe(32)
    now = timezone.now()
    OneTimeLink.objects.create(
        kind=kind,
        digest=_token_digest(token),
        user=user,
        created_at=now,
        expires_at=now + life if life else None,
    )
    return token


def _token_digest(token: str) -> str:
    # The token is 256 random bits: a plain digest cannot be searched backwards.
    return hashlib.sha256(token.encode()).hexdigest()


def link_find(token: str, *, setup: bool) -> OneTimeLink:
    """The open link of this token. Raises NotFound when unknown, used or expired."""
    link = (
        OneTimeLink.objects.select_related("user")
        .filter(digest=_token_digest(token), used_at=None)
        .first()
    )
    if (
        link is None
        or (link.kind == OneTimeLink.Kind.SETUP) is not setup
        or (link.expires_at is not None and link.expires_at <= timezone.now())
        or (link.user is not None and not link.user.is_active)
        or (setup and User.objects.exists())
    ):
        raise NotFound("This link was used already, or it is too old.")
    return link


def setup_link_use(link: OneTimeLink, *, username: str, password: str) -> User:
    """Make the first admin. Raises NotFound when somebody else was first."""
    validate_password(password, User(username=username))
    with transaction.atomic():
        _link_take(link)
        if User.objects.exists():
            raise NotFound("There is a user already: the first set-up is done.")
        return user_create(username, password=password, is_admin=True)


def invite_link_use(link: OneTimeLink, *, password: str) -> User:
    """Set the password of the link's user, which signs all other browsers of theirs out."""
    user = link.user
    if user is None:
        raise BadRequest("This link belongs to nobody.")
    with transaction.atomic():
        user_set_password(user, password)
        _link_take(link)
    return user


def _link_take(link: OneTimeLink) -> None:
    # One conditional update, so that of two visitors at once only one gets through.
    taken = OneTimeLink.objects.filter(pk=link.pk, used_at=None).update(used_at=timezone.now())
    if not taken:
        raise NotFound("This link was used already, or it is too old.")
