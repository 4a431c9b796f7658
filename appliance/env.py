"""Strict reading of the environment: a wrong value stops the start and says what is allowed."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

import dj_database_url

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off", ""}


# Every name that was asked for, whether it was set or not.
_asked: set[str] = set()


class EnvError(SystemExit):
    """A setting in the environment has a value that is not allowed.

    Settings are read while Python imports; as a SystemExit it ends any command with its message
    alone instead of a traceback.
    """


def _get(name: str) -> str | None:
    _asked.add(name)
    return os.environ.get(name)


def env_is_set(name: str) -> bool:
    """Whether the value of `name` came from the environment; empty counts as unset."""
    return bool(os.environ.get(name))


def env_unknown(prefix: str) -> list[str]:
    """Names in the environment that begin with `prefix` and that nothing asked for."""
    return sorted(name for name in os.environ if name.startswith(prefix) and name not in _asked)


def env_str(name: str, default: str, *, allowed: tuple[str, ...] | None = None) -> str:
    """The value of `name`; empty counts as unset."""
    got = _get(name) or default
    if allowed is not None and got not in allowed:
        raise EnvError(f"{name} is {got!r}; allowed are {', '.join(allowed)}.")
    return got


def env_time_zone(name: str, default: str) -> str:
    """An IANA name, such as Europe/Berlin."""
    got = env_str(name, default)
    try:
        ZoneInfo(got)
    except (KeyError, ValueError, OSError) as exc:
        raise EnvError(
            f"{name} is {got!r}, which is no time zone; an IANA name such as UTC or Europe/Berlin "
            "is allowed."
        ) from exc
    return got


def env_database(name: str) -> dict[str, Any] | None:
    """Django's settings of the database that the URL in `name` names; None when it is unset."""
    got = env_str(name, "")
    if not got:
        return None
    try:
        return dict(dj_database_url.parse(got, conn_health_checks=True))
    except (dj_database_url.ParseError, dj_database_url.UnknownSchemeError, ValueError) as exc:
        # Not the value: it holds a password.
        raise EnvError(
            f"{name} is no database address; postgresql://USER:PASSWORD@HOST/NAME is allowed."
        ) from exc


def env_bool(name: str, default: bool) -> bool:
    got = _get(name)
    if got is None:
        return default
    if got.lower() in _TRUE:
        return True
    if got.lower() in _FALSE:
        return False
    raise EnvError(f"{name} is {got!r}; allowed are 1, true, yes, on, 0, false, no, off.")


def env_int(name: str, default: int, *, low: int, high: int) -> int:
    got = _get(name)
    if not got:
        return default
    try:
        value = int(got)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise EnvError(f"{name} is {got!r}; a whole number from {low} to {high} is allowed.")
    return value


def env_url(name: str, default: str) -> str:
    """An address that begins with http:// or https:// and holds no password."""
    got = env_str(name, default)
    try:
        parts = urlsplit(got)
        is_fine = parts.scheme in ("http", "https") and parts.hostname and not parts.username
        is_fine = is_fine and not parts.query and not parts.fragment
    except ValueError:
        is_fine = False
    if not is_fine:
        # Not the value: it may hold a password.
        raise EnvError(f"{name} is no web address; https://huggingface.co is an example.")
    return got.rstrip("/")


def env_folder(name: str, default: Path) -> Path:
    """A folder that this account can write; made for it alone where it is missing."""
    path = Path(_get(name) or default).expanduser().resolve()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise EnvError(f"{name} is {str(path)!r}, which cannot be made: {exc.strerror}.") from exc
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise EnvError(
            f"{name} is {str(path)!r}, which this account cannot write. Run this as the account "
            "that the server runs as."
        )
    return path


def env_list(name: str) -> list[str]:
    """Comma-separated values, blanks dropped."""
    return [part.strip() for part in (_get(name) or "").split(",") if part.strip()]


def env_origins(name: str) -> list[str]:
    """Comma-separated origins, each exactly as a browser sends it: scheme, host, port."""
    origins = env_list(name)
    for origin in origins:
        parts = urlsplit(origin)
        made = f"{parts.scheme}://{parts.netloc}"
        if parts.scheme not in ("http", "https") or origin != made or origin != origin.lower():
            raise EnvError(
                f"{name} has {origin!r}; allowed are origins such as https://tools.example:8443, "
                "in small letters and without a path."
            )
        if not parts.hostname or "*" in origin or "@" in origin:
            raise EnvError(f"{name} has {origin!r}; name each host in full.")
    return origins


def env_secret(name: str, make: Callable[[], str]) -> str:
    """`name`, else the content of the file that `name`_FILE names, else `make()`."""
    if got := _get(name):
        return got
    if path := _get(f"{name}_FILE"):
        try:
            text = Path(path).read_text(encoding="utf-8").strip()
        except OSError as exc:
            raise EnvError(f"{name}_FILE is {path!r}, which cannot be read: {exc}.") from exc
        if not text:
            raise EnvError(f"{name}_FILE is {path!r}, which is empty.")
        return text
    return make()


def secret_from_file(path: Path) -> str:
    """The secret kept in `path`; made there with mode 0600 when it does not exist."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        pass
    except OSError as exc:
        raise EnvError(
            f"{path} cannot be read: {exc.strerror}. Run this as the server's own account."
        ) from exc
    secret = secrets.token_urlsafe(50)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:  # another process of the same start was first
        return path.read_text(encoding="utf-8").strip()
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(secret)
    return secret
