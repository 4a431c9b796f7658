"""Issue, check and revoke API keys. A secret exists in clear only in the answer to its issue."""

import ipaddress
import secrets
import string
from collections.abc import Sequence
from datetime import timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import Q
from django.utils import timezone
from django.utils.crypto import salted_hmac

from appliance.accounts.acts import act_done
from appliance.accounts.models import User
from appliance.accounts.services import user_seen
from appliance.api_keys.models import SCOPES, ApiKey, KeyRules
from appliance.api_keys.networks import networks_hold
from appliance.errors import BadRequest, Conflict, NotAllowed, NotAuthenticated, NotFound

MARKER = "bh_"
PREFIX_LENGTH = len(MARKER) + 4
# 40 letters of 62 are 238 bits: guessing is hopeless, so a fast digest is enough.
SECRET_LETTERS = 40
MAX_KEYS_RULE = 1000
USED_EVERY = timedelta(minutes=1)
MAX_LIFE_DAYS = 3660
MAX_OVERLAP = timedelta(days=30)
MAX_MODELS = 50
_ONLY_ROW = 1
_ALPHABET = string.ascii_letters + string.digits
# No key is near this; longer headers are not worth a digest.
_MAX_HEADER = 1024


def api_key_issue(
    owner: User,
    name: str,
    scopes: Sequence[str] = ("chat", "models"),
    expires_in: timedelta | None = None,
    *,
    allowed_models: Sequence[str] = (),
    allowed_networks: Sequence[str] = (),
    source: str = "api",
    generation_class: str = "api",
    by: User | None = None,
) -> tuple[ApiKey, str]:
    """Make a key; returns it with the secret, which cannot be shown again.

    Args:
        allowed_networks: as `networks_parse` gives them; none means from anywhere.
        by: the admin who makes it for somebody else, for the record.

    Raises BadRequest for a wrong name, scope or life, NotAllowed for scope admin without being
    an admin, Conflict when the owner has too many keys.
    """
    name = name.strip()
    if not 1 <= len(name) <= 80 or not name.isprintable():
        raise BadRequest("A key needs a name of 1 to 80 letters, in one line.", param="name")
    unknown = [scope for scope in scopes if scope not in SCOPES]
    if unknown or not scopes:
        raise BadRequest(
            f"Scopes are {', '.join(SCOPES)}; got {', '.join(unknown) or 'none'}.", param="scopes"
        )
    if "admin" in scopes and not owner.is_admin:
        raise NotAllowed("Only an admin can have a key with scope admin.", param="scopes")
    if expires_in is not None and not timedelta() < expires_in <= timedelta(days=MAX_LIFE_DAYS):
        raise BadRequest("A key can last from 1 day to 10 years.", param="expires")
    now = timezone.now()
    if source == "api":
        _check_rules(owner, expires_in)
    secret = _new_secret()
    with transaction.atomic():
        key = ApiKey.objects.create(
            prefix=secret[:PREFIX_LENGTH],
            digest=_digest(secret.encode(), settings.SECRET_KEY),
            owner=owner,
            name=name,
            scopes=[scope for scope in SCOPES if scope in scopes],
            allowed_models=_names(allowed_models),
            allowed_networks=list(allowed_networks),
            source=source,
            generation_class=generation_class,
            created_at=now,
            expires_at=now + expires_in if expires_in else None,
        )
        if by is not None:
            act_done(by, "key.create", _words(key), owner=owner.username)
    return key, secret


def _new_secret() -> str:
    return MARKER + "".join(secrets.choice(_ALPHABET) for _ in range(SECRET_LETTERS))


def _names(models: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in models if name.strip()))
    if len(names) > MAX_MODELS or any(len(name) > 200 for name in names):
        raise BadRequest(
            f"At most {MAX_MODELS} names of models of 200 letters each are allowed.", param="models"
        )
    return names


def _words(key: ApiKey) -> str:
    return f"“{key.name}” ({key.prefix})"


def api_key_restrict(
    key: ApiKey,
    *,
    allowed_models: Sequence[str],
    allowed_networks: Sequence[str],
    by: User | None = None,
) -> None:
    """Set the models and networks the key is good for, from its next request on; none: all.

    `by` is the admin who does it for somebody else, for the record.
    """
    wanted = {"allowed_models": _names(allowed_models), "allowed_networks": list(allowed_networks)}
    before = {name: getattr(key, name) for name in wanted}
    with transaction.atomic():
        ApiKey.objects.filter(pk=key.pk).update(**wanted)
        if by is not None and before != wanted:
            about = {"before": before, "after": wanted, "owner": key.owner.username}
            act_done(by, "key.restrict", _words(key), **about)
    for name, value in wanted.items():
        setattr(key, name, value)


def api_key_rotate(key: ApiKey, overlap: timedelta, *, by: User | None = None) -> str:
    """Give the key another secret, and return it; the old one opens for `overlap` longer.

    Name, limits, usage and the length of its life stay; a secret from an earlier rotation is dead.

    Raises BadRequest for an overlap out of range, Conflict for a key that is not live.
    """
    if not timedelta() <= overlap <= MAX_OVERLAP:
        raise BadRequest("The old secret can go on for 30 days at most.", param="overlap")
    now = timezone.now()
    secret = _new_secret()
    life = None if key.expires_at is None else key.expires_at - (key.rotated_at or key.created_at)
    longest = key_rules().max_life_days if key.source == "api" else None
    if longest is not None:
        life = min(life or timedelta(days=longest), timedelta(days=longest))
    with transaction.atomic():
        kept = ApiKey.objects.select_for_update().get(pk=key.pk)
        if not kept.is_live:
            raise Conflict("This key was revoked or has ended. Make another.")
        key.old_prefix, key.old_digest = kept.prefix, kept.digest
        # Not longer than it would have opened without the rotation.
        key.old_until = min(now + overlap, kept.expires_at or now + overlap)
        key.prefix = secret[:PREFIX_LENGTH]
        key.digest = _digest(secret.encode(), settings.SECRET_KEY)
        key.rotated_at = now
        key.expires_at = None if life is None else now + life
        fields = ("prefix", "digest", "old_prefix", "old_digest", "old_until")
        key.save(update_fields=[*fields, "rotated_at", "expires_at"])
        if by is not None:
            act_done(by, "key.rotate", _words(key), owner=key.owner.username)
    return secret


def _check_rules(owner: User, expires_in: timedelta | None) -> None:
    """The admins' rules. Keys that the server makes for itself go by none."""
    rules = key_rules()
    now = timezone.now()
    live = owner.api_keys.filter(revoked_at=None, source="api").exclude(expires_at__lte=now).count()
    if live >= rules.max_live_keys:
        raise Conflict(
            f"{owner.username} has {live:,} live keys; {rules.max_live_keys:,} are allowed here. "
            "Revoke one that is not needed first."
        )
    longest = rules.max_life_days
    if longest is None or (expires_in is not None and expires_in <= timedelta(days=longest)):
        return
    got = "no end" if expires_in is None else f"{expires_in.days:,} days"
    raise BadRequest(
        f"A key may last {longest:,} days at most here; got {got}. Choose an earlier end.",
        param="expires",
    )


def key_rules() -> KeyRules:
    """The rules that hold; not saved yet when nobody has changed them."""
    return KeyRules.objects.filter(pk=_ONLY_ROW).first() or KeyRules(pk=_ONLY_ROW)


def key_rules_set(by: User, *, max_live_keys: int, max_life_days: int | None) -> KeyRules:
    """Holds for keys made from now on; those that exist stay. Raises BadRequest out of range."""
    if not 0 <= max_live_keys <= MAX_KEYS_RULE:
        raise BadRequest(f"0 to {MAX_KEYS_RULE:,} keys are allowed.", param="max_live_keys")
    if max_life_days is not None and not 1 <= max_life_days <= MAX_LIFE_DAYS:
        raise BadRequest(f"1 to {MAX_LIFE_DAYS:,} days are allowed.", param="max_life_days")
    with transaction.atomic():
        rules = key_rules()
        wanted = {"max_live_keys": max_live_keys, "max_life_days": max_life_days}
        before = {n: getattr(rules, n) for n, v in wanted.items() if getattr(rules, n) != v}
        if before:
            for name in before:
                setattr(rules, name, wanted[name])
            rules.save()
            after = {name: wanted[name] for name in before}
            act_done(by, "key.rules", ", ".join(after), before=before, after=after)
    return rules


def api_key_revoke(key: ApiKey, *, by: User | None = None) -> None:
    """Takes effect on the next request. Revoking twice keeps the first instant.

    `by` is the admin who revokes it, for the record; None when it is the owner or the server.
    """
    now = timezone.now()
    with transaction.atomic():
        if ApiKey.objects.filter(pk=key.pk, revoked_at=None).update(revoked_at=now) and by:
            act_done(by, "key.revoke", _words(key), owner=key.owner.username)
    key.revoked_at = key.revoked_at or now


def api_key_of(owner: User, key_id: int) -> ApiKey:
    """The owner's own key. Raises NotFound also for a key of somebody else."""
    key = ApiKey.objects.filter(owner=owner, pk=key_id).first()
    if key is None:
        raise NotFound("There is no such key.")
    return key


def api_key_is_live(key_id: int) -> bool:
    """Whether the key and its owner still hold: for answers that run on after the check."""
    key = ApiKey.objects.select_related("owner").filter(pk=key_id).first()
    return key is not None and key.is_live and key.owner.is_active


def api_key_authenticate(
    authorization_header: bytes | str | None, *, scope: str, address: str | None = None
) -> ApiKey:
    """The live key that an `Authorization` header names, with its owner loaded.

    Any header a caller can send ends in a key or in one of the two errors.

    Raises:
        NotAuthenticated: no key, or one that is unknown, expired, revoked or of an inactive user.
        NotAllowed: the key lacks `scope`, or `address` is in none of its networks.
    """
    secret = _secret_from_header(authorization_header)
    digests = [
        _digest(secret, server_key)
        for server_key in (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)
    ]
    # Looking up a keyed digest in an index tells a caller nothing about other digests.
    opens = Q(digest__in=digests) | Q(old_digest__in=digests)
    key = ApiKey.objects.select_related("owner").filter(opens).first()
    if key is None or (key.digest not in digests and not key.has_old_secret):
        raise NotAuthenticated("This API key is not known. Check it, or make another.")
    if key.revoked_at is not None:
        raise NotAuthenticated("This API key was revoked. Make another on the account page.")
    if key.is_expired:
        raise NotAuthenticated("This API key has expired. Make another on the account page.")
    if not key.owner.is_active:
        raise NotAuthenticated("The account of this API key is switched off.")
    if key.allowed_networks and not networks_hold(key.allowed_networks, address):
        raise NotAllowed("This API key may not be used from your network address.")
    if scope not in key.scopes:
        raise NotAllowed(
            f"This API key may not do this: it lacks the scope {scope}. Make a key that has it."
        )
    if scope == "admin" and not key.owner.is_admin:
        raise NotAllowed("The owner of this API key is no longer an admin.")
    _note_use(key, address)
    return key


def _secret_from_header(header: bytes | str | None) -> bytes:
    if isinstance(header, str):
        header = header.encode("utf-8", "surrogatepass")
    # Split on blanks and tabs only: other control bytes belong to the (then unknown) key.
    scheme, _, rest = (header or b"").strip(b" \t").partition(b" ")
    secret = rest.strip(b" \t")
    if scheme.lower() != b"bearer" or not secret:
        raise NotAuthenticated("An API key is needed: send the header “Authorization: Bearer KEY”.")
    if len(secret) > _MAX_HEADER:
        raise NotAuthenticated("This API key is not known. Check it, or make another.")
    return secret


def _digest(secret: bytes, server_key: str | bytes) -> str:
    return salted_hmac(
        "appliance.api_keys", secret, secret=server_key, algorithm="sha256"
    ).hexdigest()


def _note_use(key: ApiKey, address: str | None) -> None:
    now = timezone.now()
    if key.last_used_at is None or now - key.last_used_at > USED_EVERY:
        key.last_used_at, key.last_used_from = now, _valid_address(address)
        ApiKey.objects.filter(pk=key.pk).update(last_used_at=now, last_used_from=key.last_used_from)
        user_seen(key.owner)


def _valid_address(address: str | None) -> str | None:
    try:
        return str(ipaddress.ip_address(address or ""))
    except ValueError:
        return None
