"""Real nginx with the configuration that is shipped, on free ports in a temporary folder."""

import contextlib
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.server import ROOT, free_port

SHIPPED = ROOT / "deploy" / "nginx.conf"
NAME = "chat.example.org"
WAIT_S = 60

# What Debian's own file gives to a site, and paths that need no other account.
MAIN = """
daemon off;
pid {folder}/pid;
error_log {folder}/error.log;
worker_processes 1;
{account}
events {{ worker_connections 256; }}
http {{
    access_log off;
    gzip on;
    gzip_types text/event-stream text/plain application/json;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/site.conf;
}}
"""
# A proxy whose owner thought of nothing: it buffers and compresses.
OUTER = """
server {{
    listen 127.0.0.1:{port};
    location / {{
        proxy_pass https://127.0.0.1:{inner};
        proxy_set_header Host {name}:{inner};
    }}
}}
"""


@contextlib.contextmanager
def nginx(folder: Path, site: str, port: int) -> Iterator[None]:
    """Serves `site` until the block ends; `port` is one that it listens on."""
    folder.mkdir()
    (folder / "site.conf").write_text(site)
    account = "user root;" if Path("/root").owner() == folder.owner() else ""
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder, account=account))
    command = ["/usr/sbin/nginx", "-e", folder / "error.log", "-c", folder / "nginx.conf"]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    process = subprocess.Popen(command)
    try:
        wait_for(port)
        yield
    finally:
        process.terminate()
        process.wait(WAIT_S)


def wait_for(port: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.02)
    raise AssertionError(f"nothing listens on {port}")


def shipped_site(server_port: int, plain_port: int, tls_port: int, certificate: Path) -> str:
    """The shipped file with only what its reader has to change: ports and certificate."""
    site = SHIPPED.read_text(encoding="utf-8")
    for shipped, here in (
        ("server 127.0.0.1:8000;", f"server 127.0.0.1:{server_port};"),
        ("listen 80;", f"listen 127.0.0.1:{plain_port};"),
        ("listen 443 ssl http2;", f"listen 127.0.0.1:{tls_port} ssl http2;"),
        ("/etc/ssl/certs/chat.example.org.pem", str(certificate)),
        ("/etc/ssl/private/chat.example.org.key", str(certificate)),
    ):
        assert site.count(shipped) == 1, f"{shipped!r} stands in the shipped file once"
        site = site.replace(shipped, here)
    return site


def make_certificate(path: Path) -> ssl.SSLContext:
    """A certificate with its key in `path`, and a client's trust in it."""
    key = path.with_suffix(".key")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", f"/CN={NAME}"),
            *("-addext", f"subjectAltName=DNS:{NAME},IP:127.0.0.1"),
            *("-keyout", key, "-out", path),
        ],
        check=True,
        capture_output=True,
    )
    trust = ssl.create_default_context(cafile=path)
    with path.open("a") as file:
        file.write(key.read_text())
    return trust


def ports(number: int) -> list[int]:
    found = {free_port() for _ in range(number * 4)}
    return list(found)[:number]
