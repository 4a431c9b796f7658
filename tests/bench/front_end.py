#!/usr/bin/env python3
"""What the web layer costs over the bare engine, on the same chats with the same model.

    front_end.py --model DIR [-n 32] [--requests 96] [--idle 500] [--json FILE]

Runs one after the other, each in a process of its own: the engine alone (`TextGenerator`, no web),
then the whole product over sockets with a client that does as little as it can. Prints the
throughput of both and their ratio (at least 0.9 is the aim), the ratio of the 95th percentiles of
the gap between two pieces of text (at most 1.5), the processor time of the event loop's thread for
each token and each request, and the memory of idle chat sockets (500 at most 100 MB). Ratios need
a quiet machine; processor time and memory do not.
"""

import argparse
import asyncio
import contextlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.appliance.serving.processes import Running, make_data_dir  # noqa: E402
from tests.bench.loadgen import chat  # noqa: E402
from tests.e2e.server import Server  # noqa: E402

SETTLE_S = 2.0
USERNAME = "bench"
# Prints a key and the cookie of a signed-in browser.
PREPARE = f"""
from django.conf import settings
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.sessions.backends.db import SessionStore
from appliance.accounts.services import user_create
from appliance.api_keys.services import api_key_issue
user = user_create({USERNAME!r})
session = SessionStore()
session[SESSION_KEY] = str(user.pk)
session[BACKEND_SESSION_KEY] = settings.AUTHENTICATION_BACKENDS[0]
session[HASH_SESSION_KEY] = user.get_session_auth_hash()
session.create()
print(api_key_issue(user, "bench")[1], settings.SESSION_COOKIE_NAME, session.session_key)
"""


@dataclass
class Run:
    """One closed loop over all chats. Times in seconds."""

    num_requests: int = 0
    num_tokens: int = 0
    wall_s: float = 0.0
    loop_s: float = 0.0
    gaps: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        gaps = sorted(self.gaps)
        return {
            "requests": self.num_requests,
            "tokens": self.num_tokens,
            "tokens_per_s": round(self.num_tokens / self.wall_s, 1),
            "itl_p50_ms": round(1e3 * gaps[len(gaps) // 2], 2),
            "itl_p95_ms": round(1e3 * gaps[int(len(gaps) * 0.95)], 2),
            "loop_us_per_token": round(1e6 * self.loop_s / self.num_tokens, 1),
        }


async def closed_loop(
    num_users: int, num_requests: int, ask: Callable[[int, Run], Awaitable[None]]
) -> Run:
    run, todo = Run(num_requests=num_requests), list(range(num_requests))

    async def user() -> None:
        while todo:
            await ask(todo.pop(), run)

    began_s = time.perf_counter()
    await asyncio.gather(*(user() for _ in range(num_users)))
    run.wall_s = time.perf_counter() - began_s
    return run


# ---- the engine alone


async def engine_run(a: argparse.Namespace) -> Run:
    from inference.config import EngineConfig
    from inference.engine import Engine
    from inference.generator import TextGenerator
    from inference.outputs import GenerationFinished, TextDelta
    from inference.runner.model_runner import ModelRunner
    from inference.sampling_params import SamplingParams
    from inference.text.chat_template import ChatTemplate
    from inference.text.tokenizer import Tokenizer

    config = EngineConfig(model_dir=a.model)
    engine = Engine(config, ModelRunner(config))
    engine.start()
    engine.wait_ready(600)
    tokenizer = Tokenizer.from_dir(a.model)
    generator = TextGenerator(engine, tokenizer, ChatTemplate.from_dir(a.model, tokenizer))

    async def ask(number: int, run: Run) -> None:
        messages, num_tokens = chat(number, "0", True, False)
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        prepared = await generator.prepare(messages, params)
        stamps = []
        async with generator.stream(
            prepared, params, request_id=f"bench-{number}", owner="bench", cache_scope="bench"
        ) as stream:
            async for event in stream:
                if isinstance(event, TextDelta):
                    stamps.append(time.perf_counter())
                elif isinstance(event, GenerationFinished):
                    run.num_tokens += event.num_completion_tokens
        run.gaps += [after - before for before, after in pairwise(stamps)]

    await closed_loop(2, 4, ask)
    before_s = loop_cpu_s(None)
    run = await closed_loop(a.n, a.requests, ask)
    run.loop_s = loop_cpu_s(None) - before_s
    await asyncio.to_thread(engine.shutdown, 0.0)
    return run


def loop_cpu_s(pid: int | None) -> float:
    """Processor time of the main thread, which runs the event loop: of `pid`, or of ours."""
    if pid is None:
        used = resource.getrusage(resource.RUSAGE_THREAD)
        return used.ru_utime + used.ru_stime
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


# ---- the product


@dataclass(frozen=True)
class Door:
    """Where the product stands and how to come in."""

    port: int
    pid: int
    model: str
    key: str
    cookie: str
    session: str


async def product_run(a: argparse.Namespace, door: Door) -> Run:
    async def ask(number: int, run: Run) -> None:
        messages, num_tokens = chat(number, "0", True, False)
        body = {
            "model": door.model,
            "messages": messages,
            "max_tokens": num_tokens,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        stamps, tail = [], b""
        async for data in http_post(door, "/v1/chat/completions", json.dumps(body).encode()):
            stamps.append(time.perf_counter())
            tail = (tail + data)[-2000:]
        usage = tail.rpartition(b'"completion_tokens":')[2]
        if not tail.rstrip().endswith(b"0") or b"[DONE]" not in tail:
            raise SystemExit(f"an answer did not end well: {tail[-300:]!r}")
        run.num_tokens += int(usage.partition(b",")[0])
        run.gaps += [after - before for before, after in pairwise(stamps[1:])]

    await closed_loop(2, 4, ask)
    if a.pause:
        input(f"process {door.pid}: press Enter to begin")
    before_s = loop_cpu_s(door.pid)
    run = await closed_loop(a.n, a.requests, ask)
    run.loop_s = loop_cpu_s(door.pid) - before_s
    return run


async def http_post(door: Door, path: str, body: bytes) -> AsyncIterator[bytes]:
    """Pieces of the answer as they arrive, undecoded."""
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    try:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {door.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise SystemExit(f"the server said {status!r}")
        while data := await reader.read(65536):
            yield data
    finally:
        writer.close()


async def idle_kb(num_sockets: int, door: Door) -> int:
    """Resident memory that open chat sockets add, in KiB."""
    before = resident_kb(door.pid)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(num_sockets):
            stack.callback((await open_socket(door)).close)
        await asyncio.sleep(SETTLE_S)
        return resident_kb(door.pid) - before


async def open_socket(door: Door) -> asyncio.StreamWriter:
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    origin = f"http://127.0.0.1:{door.port}"
    writer.write(
        f"GET /ws/chat/ HTTP/1.1\r\nHost: 127.0.0.1:{door.port}\r\nOrigin: {origin}\r\n"
        f"Cookie: {door.cookie}={door.session}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    status = await reader.readline()
    if b" 101 " not in status:
        raise SystemExit(f"a chat socket was refused: {status!r}")
    return writer


def resident_kb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


@contextlib.contextmanager
def product(a: argparse.Namespace) -> Iterator[Door]:
    """The product as it is, with the model."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), a.model)
        server.start()
        try:
            said = server.manage("shell", "-v", "0", "-c", PREPARE)
            assert server.process is not None
            yield Door(server.port, server.process.pid, a.model.name, *said.split())
        finally:
            server.stop()


@contextlib.contextmanager
def paced(a: argparse.Namespace) -> Iterator[Door]:
    """The product with a runner that computes nothing; see `paced_server`."""
    with tempfile.TemporaryDirectory() as folder:
        code = f"import sys, django; django.setup(){PREPARE}"
        code += "sys.stdout.flush()\nfrom tests.bench.paced_server import main; main(*sys.argv[1:])"
        command = ["-c", code, "{port}", str(a.model.resolve()), str(a.step_ms)]
        running = Running(make_data_dir(Path(folder)), command)
        try:
            said = running.line()
            running.until_ready()
            yield Door(running.port, running.process.pid, "paced", *said.split())
        finally:
            running.end()


def product_figures(a: argparse.Namespace, door: Door) -> dict[str, Any]:
    figures: dict[str, Any] = asyncio.run(product_run(a, door)).figures()
    if a.idle:
        figures["idle_sockets_mb"] = round(asyncio.run(idle_kb(a.idle, door)) / 1024, 1)
    return figures


def main(a: argparse.Namespace) -> int:
    if a.part == "engine":
        print(json.dumps(asyncio.run(engine_run(a)).figures()))
        return 0
    with paced(a) if a.part == "cost" else product(a) as door:
        served = product_figures(a, door)
    print("product", served, flush=True)
    if a.part is not None:
        return 0
    command = [sys.executable, __file__, "--model", str(a.model), "--part", "engine"]
    command += ["-n", str(a.n), "--requests", str(a.requests)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    engine = json.loads(done.stdout)
    print("engine ", engine)
    ratios = {
        "throughput": round(served["tokens_per_s"] / engine["tokens_per_s"], 3),
        "itl_p95": round(served["itl_p95_ms"] / engine["itl_p95_ms"], 3),
    }
    print("ratio  ", ratios)
    if a.json:
        figures = {"product": served, "engine": engine, "ratios": ratios, "n": a.n}
        a.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a model folder")
    parser.add_argument("-n", type=int, default=32, help="chats at the same time")
    parser.add_argument("--requests", type=int, default=96, help="chats in all")
    parser.add_argument("--idle", type=int, default=500, help="idle chat sockets; 0: none")
    parser.add_argument("--part", choices=("engine", "product", "cost"), help="only this one")
    parser.add_argument(
        "--step-ms", type=float, default=20, help="length of a step of the part cost"
    )
    parser.add_argument("--pause", action="store_true", help="wait before the load, for a profiler")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    sys.exit(main(parser.parse_args()))
