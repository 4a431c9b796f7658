#!/usr/bin/env python3
"""Closed-loop load generator for any OpenAI-compatible chat server.

Sends the same deterministic mix of chats at each concurrency level N and
prints, per level: output tokens/s over all users, time to first token (TTFT,
ms), inter-token latency (ITL, ms), end-to-end latency (s) and failures.

    loadgen.py --url http://127.0.0.1:8000/v1 --model NAME -n 1,2,4,8,16

The mix: a system prompt that every user shares, a prompt whose length varies
(about 30 to 600 tokens), and a reply length that varies (32 to 256 tokens,
held exactly by ignore_eos where the server knows that field).
Only aiohttp is needed. Every figure is measured at the client, and output
tokens are the server's own `usage` count where it sends one.
"""

import argparse
import asyncio
import itertools
import json
import random
import sys
import time

import aiohttp

SYSTEM = (
    "You are the assistant of a small engineering team. Answer plainly and "
    "briefly. Say so when you do not know. Prefer concrete numbers, short "
    "lists and runnable commands. Never invent file names, versions, or "
    "people. When a question is ambiguous, state the reading you chose and "
    "answer that one. Keep code in fenced blocks and explain only what is "
    "not obvious from the code. The team runs Debian servers, PostgreSQL, "
    "Redis, Python and a little Go; assume these unless told otherwise. "
)
TOPICS = (
    "why a nightly backup of a PostgreSQL database became slow last week",
    "how to rotate the logs of a Python service without losing lines",
    "what a load balancer does when one of three servers stops answering",
    "how to read a flame graph of a web server under load",
    "which index helps a query that filters by team and sorts by date",
    "how to plan the memory of a cache shared by eight workers",
    "why two clocks on two machines disagree and what to do about it",
    "how to write a test for code that retries a failed request",
    "what happens to open connections during a rolling deployment",
    "how to explain continuous batching to a new colleague",
)
DETAIL = (
    "The service handles about forty requests a second at noon and almost none at night",
    "Each request touches three tables and writes one audit row",
    "We measured the disk and it is idle most of the time",
    "A colleague changed the pool size from ten to fifty last month",
    "The graphs show short spikes every five minutes",
    "We cannot take the service down before Friday",
    "The same job runs well on the staging machine with a copy of the data",
    "There is a cron entry that nobody remembers writing",
    "Memory grows slowly and falls when the worker restarts",
    "The error says only that the connection was reset by the peer",
    "",
)


def chat(i, seed, shared_system, long_prompts):
    """The i-th chat: (messages, reply length in tokens)."""
    r = random.Random(f"{seed}/{i}")
    n = r.choice((2, 4, 8, 16, 32)) * (8 if long_prompts else 1)
    body = ". ".join(r.choice(DETAIL).strip(". ") for _ in range(n)) + "."
    system = SYSTEM if shared_system else f"Conversation {r.random()}. " + SYSTEM
    msgs = [
        {"role": "system", "content": system},
        {"role": "user", "content": f"Case {i}. Explain {r.choice(TOPICS)}. {body}"},
    ]
    return msgs, r.choice((32, 64, 96, 128, 256))


async def one(session, a, i, rows):
    msgs, want = chat(i, a.seed, not a.no_shared_prefix, a.long)
    body = {
        "model": a.model,
        "messages": msgs,
        "max_tokens": want,
        "stream": True,
        "temperature": 0,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    t0 = time.perf_counter()
    stamps, usage, err = [], None, None
    try:
        async with session.post(a.url.rstrip("/") + "/chat/completions", json=body) as r:
            if r.status != 200:
                err = f"HTTP {r.status}: {(await r.text())[:200]}"
            else:
                async for raw in r.content:
                    line = raw.decode("utf-8", "replace").strip()
                    if not line.startswith("data:"):
                        continue
                    data = line[5:].strip()
                    if data == "[DONE]":
                        break
                    o = json.loads(data)
                    if o.get("usage"):
                        usage = o["usage"]
                    if o.get("choices") and (o["choices"][0].get("delta") or {}).get("content"):
                        stamps.append(time.perf_counter())
    except Exception as e:  # a failed request is a row, never a crash
        err = f"{type(e).__name__}: {e}"
    t1 = time.perf_counter()
    if not err and not stamps:
        err = "no content"
    rows.append(
        {
            "i": i,
            "err": err,
            "e2e": t1 - t0,
            "want": want,
            "tokens": (usage or {}).get("completion_tokens") or len(stamps),
            "prompt": (usage or {}).get("prompt_tokens"),
            "ttft": stamps[0] - t0 if stamps else None,
            "itl": [b - a_ for a_, b in itertools.pairwise(stamps)],
        }
    )


async def level(a, n, first):
    rows, todo = [], list(range(first, first + max(a.requests, n * a.per_user)))
    todo.reverse()
    conn = aiohttp.TCPConnector(limit=0, force_close=True)
    headers = {"Authorization": f"Bearer {a.api_key}"} if a.api_key else {}
    timeout = aiohttp.ClientTimeout(total=a.timeout)
    async with aiohttp.ClientSession(connector=conn, headers=headers, timeout=timeout) as s:

        async def user():
            while todo:
                await one(s, a, todo.pop(), rows)

        t0 = time.perf_counter()
        await asyncio.gather(*(user() for _ in range(n)))
        wall = time.perf_counter() - t0
    ok = [r for r in rows if not r["err"]]

    def pct(xs, p):
        xs = sorted(xs)
        return xs[min(len(xs) - 1, int(p * len(xs)))] if xs else float("nan")

    itl = [x for r in ok for x in r["itl"]]
    res = {
        "n": n,
        "requests": len(rows),
        "failed": len(rows) - len(ok),
        "wall_s": round(wall, 2),
        "out_tok_s": round(sum(r["tokens"] for r in ok) / wall, 1),
        "in_tok_s": round(sum(r["prompt"] or 0 for r in ok) / wall, 1),
        "ttft_p50_ms": round(1e3 * pct([r["ttft"] for r in ok], 0.5), 1),
        "ttft_p95_ms": round(1e3 * pct([r["ttft"] for r in ok], 0.95), 1),
        "itl_p50_ms": round(1e3 * pct(itl, 0.5), 1),
        "itl_p95_ms": round(1e3 * pct(itl, 0.95), 1),
        "e2e_p50_s": round(pct([r["e2e"] for r in ok], 0.5), 2),
        "short": sum(r["tokens"] < r["want"] for r in ok),
        "errors": sorted({r["err"] for r in rows if r["err"]})[:3],
    }
    return res, first + len(rows)


def line_of(r):
    """One level as a row of the table."""
    row = (
        f"{r['n']:>3} {r['requests']:>4} {r['failed']:>4} {r['out_tok_s']:>9} {r['in_tok_s']:>8} "
        f"{r['ttft_p50_ms']:>7}ms {r['ttft_p95_ms']:>6}ms {r['itl_p50_ms']:>6}ms "
        f"{r['itl_p95_ms']:>6}ms {r['e2e_p50_s']:>7}s"
    )
    if r["short"]:
        row += f"  short={r['short']}"
    if r["errors"]:
        row += f"  {r['errors']}"
    return row


async def main(a):
    out, first = [], 1000
    if a.warmup:
        await level(
            argparse.Namespace(**{**vars(a), "requests": a.warmup, "per_user": 1}),
            min(2, a.warmup),
            0,
        )
    print("  N  req fail out tok/s in tok/s  TTFT p50      p95  ITL p50      p95  e2e p50")
    for n in a.n:
        r, first = await level(a, n, first)
        out.append(r)
        print(line_of(r), flush=True)
    if a.json:
        with open(a.json, "w") as f:
            json.dump(
                {"args": {k: v for k, v in vars(a).items() if k != "api_key"}, "levels": out},
                f,
                indent=1,
            )
    return 1 if any(r["failed"] for r in out) else 0


if __name__ == "__main__":
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--url", required=True, help="base URL ending in /v1")
    p.add_argument("--model", required=True)
    p.add_argument("--api-key", default="")
    p.add_argument("-n", type=lambda s: [int(x) for x in s.split(",")], default=[1, 2, 4, 8, 16])
    p.add_argument("--requests", type=int, default=8, help="at least this many chats a level")
    p.add_argument("--per-user", type=int, default=3, help="at least this many chats a user")
    p.add_argument("--warmup", type=int, default=2)
    p.add_argument("--seed", default="0")
    p.add_argument("--no-shared-prefix", action="store_true")
    p.add_argument("--long", action="store_true", help="prompts eight times as long")
    p.add_argument("--timeout", type=float, default=600)
    p.add_argument("--json", help="also write the figures here")
    sys.exit(asyncio.run(main(p.parse_args())))
