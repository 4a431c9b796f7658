"""What must hold before the server starts. Each failure is a `StartRefused`: what, why, what to do.

Blocking, on the main thread, before any event loop runs.
"""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from django.conf import settings
from django.core.cache import cache
from django.db import DatabaseError, connections
from django.db.migrations.executor import MigrationExecutor
from redis.exceptions import RedisError

from appliance.exposure.policy import parse_address


class StartRefused(Exception):
    """The server cannot start; the text says what is wrong and what to do."""


@contextlib.contextmanager
def data_dir_lock(data_dir: Path) -> Iterator[None]:
    """Hold the data folder: a second engine on the same data would undo what this one counts."""
    path = data_dir / "serve.lock"
    try:
        # Not truncated before the lock is ours: the holder's process id stands in it.
        lock = path.open("a+", encoding="ascii")
    except OSError as exc:
        raise StartRefused(
            f"The data folder {data_dir} cannot be written: {exc.strerror}. Mend its owner and "
            "mode, or choose another with APPLIANCE_DATA_DIR."
        ) from exc
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            lock.seek(0)
            holder = lock.read(20).strip() or "unknown"
            raise StartRefused(
                f"Another server (process {holder}) already runs on the data folder {data_dir}. "
                "Stop it first, or choose another folder with APPLIANCE_DATA_DIR."
            ) from exc
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def address_write(data_dir: Path, host: str, port: int) -> None:
    """Tell this machine's other processes of the same data folder where the server listens."""
    address = parse_address(host.strip("[]"))
    if address is not None and address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    (data_dir / "serve.address").write_text(url_of(host, port, ()), encoding="ascii")


def address_read(data_dir: Path) -> tuple[str, int] | None:
    """URL and process id of the server that runs on this data folder; None when none runs."""
    try:
        with (data_dir / "serve.lock").open("r", encoding="ascii") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                url = (data_dir / "serve.address").read_text(encoding="ascii").strip()
                return url, int(lock.read(20))
    except (OSError, ValueError):
        return None
    return None


def require_schema() -> None:
    """The database must answer and have every table of this version."""
    try:
        connection = connections["default"]
        executor = MigrationExecutor(connection)
        plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
    except DatabaseError as exc:
        raise StartRefused(
            f"The database does not answer: {exc}. Check DATABASE_URL and that it runs."
        ) from exc
    if not plan:
        return
    where = "The database"
    if connection.vendor == "sqlite":
        where += f" in the data folder {settings.DATA_DIR}"
    if len(plan) == len(executor.loader.graph.nodes):
        lacks = f"{where} is empty. APPLIANCE_DATA_DIR or DATABASE_URL may name another."
    else:
        first, changes = plan[0][0], "change" if len(plan) == 1 else "changes"
        lacks = (
            f"{where} lacks {len(plan)} {changes} of this version (the first is "
            f"{first.app_label}.{first.name})."
        )
    raise StartRefused(f"{lacks} Run: manage.py migrate")


def require_redis() -> None:
    """Where Redis is set it must answer: sign-in, chat and the worker need it."""
    if not settings.REDIS_URL:
        return
    try:
        cache.get("start")
    except ValueError as exc:
        # Not the value, nor the error: they hold a password.
        raise StartRefused(
            "REDIS_URL is no address of a Redis server; redis://:PASSWORD@HOST:6379/0 is allowed."
        ) from exc
    except RedisError as exc:
        raise StartRefused(
            f"Redis does not answer: {str(exc).rstrip('.')}. Check REDIS_URL and that it "
            "runs, or unset REDIS_URL to serve without Redis."
        ) from exc


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. `::` takes IPv4 callers too."""
    bare = host.strip("[]")
    try:
        found = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as exc:
        raise StartRefused(
            f"{host} is no address of this machine: {exc.strerror}. Give --host an IP address."
        ) from exc
    family, kind, protocol, _, address = found[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind(address)
        listening.listen(1024)
    except OSError as exc:
        listening.close()
        raise StartRefused(_listen_trouble(host, port, exc)) from exc
    return listening


def _listen_trouble(host: str, port: int, exc: OSError) -> str:
    where = f"Port {port} on {host}"
    if exc.errno == errno.EADDRINUSE:
        return (
            f"{where} is in use by another program. Stop that one, or choose another port with "
            "--port."
        )
    if exc.errno == errno.EACCES:
        return (
            f"{where} may not be opened by this user: ports below 1024 need a privilege. Choose a "
            "higher one with --port, and let a reverse proxy take 443."
        )
    if exc.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine. Give --host one of its own, or 127.0.0.1."
    return f"{where} cannot be opened: {exc.strerror}."


def url_of(host: str, port: int, names: tuple[str, ...]) -> str:
    """An address that works in a browser; for a bind to all addresses a declared name."""
    address = parse_address(host.strip("[]"))
    if address is not None and address.is_unspecified:
        local = ("localhost", "127.0.0.1", "[::1]")
        named = [name for name in names if name not in local and not name.startswith(".")]
        host = named[0] if named else "127.0.0.1"
    elif address is not None and address.version == 6:
        host = f"[{address}]"
    return f"http://{host}:{port}/"
