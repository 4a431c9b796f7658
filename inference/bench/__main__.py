"""Command line of the measurements; every table ends with machine, commit and settings."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inference.bench import interference, paths, planning

_RATES = ("read_bytes_per_s", "flops_per_s")
_ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m inference.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    speed = commands.add_parser("paths", help="decode and prefill speed of forward paths")
    speed.add_argument("--model", type=Path, required=True, help="model folder")
    speed.add_argument(
        "--paths",
        default="native:bfloat16,torch:bfloat16",
        help="backend:dtype[:word…],… where a word is a set of kernels, dense or int8",
    )
    speed.add_argument("--batches", type=_numbers, default=[1, 4, 8, 16])
    speed.add_argument("--context", type=int, default=256)
    speed.add_argument("--prompts", type=_numbers, default=[128, 512, 2048])
    speed.add_argument("--tokens", type=int, default=48, help="tokens an answer has")
    speed.add_argument("--runs", type=int, default=3, help="every path so often, in turn")
    speed.add_argument("--child", help=argparse.SUPPRESS)
    commands.add_parser("planning", help="host cost of a step, block pool, memory waste")
    disturbed = commands.add_parser(
        "interference", help="what a long prompt does to answers being written"
    )
    disturbed.add_argument("--model", type=Path, required=True, help="model folder")
    disturbed.add_argument("--streams", type=int, default=4)
    disturbed.add_argument("--context", type=int, default=256, help="tokens before each answer")
    disturbed.add_argument("--prompt", type=int, default=6000, help="tokens of the long prompt")
    disturbed.add_argument("--runs", type=int, default=3)
    options = parser.parse_args(arguments)
    if options.command == "planning":
        _planning()
    elif options.command == "interference":
        _interference(options)
    elif options.child:
        _write(json.dumps(_measure(options, options.child)))
    else:
        _paths(options)
    return 0


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _measure(options: argparse.Namespace, path: str) -> dict[str, Any]:
    return paths.measure(
        options.model,
        path,
        batches=options.batches,
        context=options.context,
        prompts=options.prompts,
        num_tokens=options.tokens,
    )


def _paths(options: argparse.Namespace) -> None:
    """Run the paths in turn, A B A B, and print the median and the spread of the runs."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.runs):
        for path in options.paths.split(","):
            runs.setdefault(path, []).append(_run_child(options, path))
    _write(
        f"{'path':<34} {'kind':<8} {'size':>5} {'ms':>9} {'spread':>15} {'tokens/s':>9} "
        f"{'x floor':>8}"
    )
    for results in runs.values():
        for levels in zip(*(result["levels"] for result in results), strict=True):
            _write(_level_row(results[0]["backend"], levels))
        rates = (statistics.median(r[name] for r in results) for name in _RATES)
        _write("{:<34} reads {:.1f} GB/s, {:.0f} GFLOP/s".format("", *(x / 1e9 for x in rates)))
    _write(f"context {options.context}, {options.tokens} tokens an answer, {options.runs} runs")
    _write(machine())


def _level_row(name: str, levels: Sequence[dict[str, Any]]) -> str:
    times = [level["step_ms"] for level in levels]
    rate = statistics.median(level["tokens_per_s"] for level in levels)
    floors = [x["step_ms"] / x["floor_ms"] for x in levels if x["floor_ms"]]
    above = f"{statistics.median(floors):>8.2f}" if floors else ""
    return (
        f"{name[:34]:<34} {levels[0]['kind']:<8} {levels[0]['size']:>5} "
        f"{statistics.median(times):>9.2f} {f'{min(times):.2f}-{max(times):.2f}':>15} "
        f"{rate:>9.0f} {above}"
    )


def _run_child(options: argparse.Namespace, path: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "inference.bench", "paths", "--model", str(options.model)]
    command += ["--batches", ",".join(map(str, options.batches))]
    command += ["--prompts", ",".join(map(str, options.prompts))]
    command += ["--context", str(options.context), "--tokens", str(options.tokens)]
    done = subprocess.run(
        [*command, "--child", path], cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    loaded: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return loaded


def _planning() -> None:
    _write(f"{'running':>8} {'waiting':>8} {'step p50 ms':>12} {'p95 ms':>8}")
    for running, waiting in ((16, 0), (16, 10_000), (256, 0), (256, 10_000)):
        median, most = planning.step_cost_ms(running, waiting)
        _write(f"{running:>8} {waiting:>8} {median:>12.3f} {most:>8.3f}")
    _write(f"block pool: {planning.pool_operations_per_s():,.0f} operations/s")
    _write(f"KV slots that hold a token: {planning.kv_fill():.1%}")
    _write(machine())


def _interference(options: argparse.Namespace) -> None:
    _write(
        f"{'answers':>7} {'prompt':>6} {'alone ms':>9} {'median ms':>9} {'p95 ms':>8} "
        f"{'chunk ms':>8} {'p95/chunk':>9}"
    )
    for _ in range(options.runs):
        run = interference.measure(options.model, options.streams, options.context, options.prompt)
        _write(
            f"{run.num_streams:>7} {run.prompt_tokens:>6} {run.undisturbed_ms:>9.1f} "
            f"{run.median_ms:>9.1f} {run.p95_ms:>8.1f} {run.chunk_ms:>8.1f} {run.ratio:>9.2f}"
        )
    _write(machine())


def machine() -> str:
    """Processor, cores and commit, for the foot of a table."""
    model = platform.processor() or platform.machine()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        names = [x for x in cpu_info.read_text().splitlines() if x.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    ).stdout.strip()
    return f"{model}, {len(os.sched_getaffinity(0))} cores, commit {commit or 'unknown'}"


if __name__ == "__main__":
    sys.exit(main())
