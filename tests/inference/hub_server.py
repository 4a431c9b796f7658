"""A small hub on a real socket: what `huggingface_hub` asks of one, and nothing more."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


class HubServer:
    """Repositories by name; every request is written down."""

    def __init__(self) -> None:
        # "org/model" -> path -> content
        self.repos: dict[str, dict[str, bytes]] = {}
        # Those that ask for a token, and for terms to be accepted.
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.token = "hf_secret"
        # (method, path, range header)
        self.asked: list[tuple[str, str, str | None]] = []
        self.tokens_seen: set[str | None] = set()
        # Path of a file -> bytes after which the connection breaks; from then on it breaks at once.
        self.breaks: dict[str, int] = {}
        # Path -> what is sent in the place of its content.
        self.sends: dict[str, bytes] = {}
        handler = type("Handler", (_Handler,), {"hub": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def fetched(self) -> list[str]:
        """Files that were asked for, in order."""
        return [path.rpartition("/")[2] for method, path, _ in self.asked if method == "GET"]


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.asked.append((self.command, path, self.headers.get("range")))
        hub.tokens_seen.add(self.headers.get("authorization"))
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            self._info(found[1], found[2], has_body)
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(found[1], found[2], found[3], has_body)
        else:
            self._send(404, {}, b"", has_body)

    def _refusal(self, repo: str, revision: str | None) -> tuple[int, str] | None:
        hub = self.hub
        is_known = self.headers.get("authorization") == f"Bearer {hub.token}"
        if repo in hub.gated and not is_known:
            return 403, "GatedRepo"
        if repo not in hub.repos or (repo in hub.private and not is_known):
            return 401, "RepoNotFound"
        if revision not in (None, "main", "v1", COMMIT):
            return 404, "RevisionNotFound"
        return None

    def _info(self, repo: str, revision: str | None, has_body: bool) -> None:
        refusal = self._refusal(repo, revision)
        if refusal:
            self._send(refusal[0], {"X-Error-Code": refusal[1]}, b"{}", has_body)
            return
        siblings = []
        for path, content in self.hub.repos[repo].items():
            entry: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": "b"}
            if path.endswith((".safetensors", ".gguf", ".bin")):
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
            siblings.append(entry)
        body = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings}
        headers = {"Content-Type": "application/json"}
        self._send(200, headers, json.dumps(body).encode(), has_body)

    def _file(self, repo: str, revision: str, path: str, has_body: bool) -> None:
        refusal = self._refusal(repo, revision)
        if refusal or path not in self.hub.repos[repo]:
            status, code = refusal or (404, "EntryNotFound")
            self._send(status, {"X-Error-Code": code}, b"", has_body)
            return
        content = self.hub.sends.get(path, self.hub.repos[repo][path])
        headers = {
            "X-Repo-Commit": COMMIT,
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "Accept-Ranges": "bytes",
        }
        status, start = 200, 0
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("range") or "")
        if asked:
            status, start = 206, int(asked[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        breaks_after = self.hub.breaks.get(path)
        if breaks_after and has_body:
            self.hub.breaks[path] = 0
        self._send(status, headers, content[start:], has_body, breaks_after)

    def _send(
        self,
        status: int,
        headers: dict[str, str],
        body: bytes,
        has_body: bool,
        breaks_after: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not has_body:
            return
        if breaks_after is not None:
            self.wfile.write(body[:breaks_after])
            self.close_connection = True
            return
        self.wfile.write(body)
