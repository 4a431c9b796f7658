"""Behind deploy/start and deploy/test: the environment, then the product or its checks.

Runs before anything is installed, so it needs the standard library only. Each step that fails says
what failed and what to do, and the exit status is not zero.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
PYTEST = (str(PYTHON), "-m", "pytest")
CONSTRAINTS = ROOT / "deploy" / "constraints.txt"
# torch and the rest unpacked, with room for pip's own temporary files.
INSTALL_BYTES = 5 * 1024**3
DEFAULT_MODEL = "smollm2-135m-instruct"
DEBIAN_PACKAGES = {
    "chromium": ("chromium",),
    "redis-server": ("redis-server",),
    "postgresql": ("/usr/lib/postgresql/*/bin/initdb",),
    "nginx-light": ("/usr/sbin/nginx",),
}


class StepFailed(Exception):
    """A step could not be done; the text says what failed and what to do."""


def say(text: str) -> None:
    print(text, flush=True)


# ---- environment


def environment_make(extras: Sequence[str]) -> None:
    """Make or complete .venv. A stamp of what was asked lets the next start skip all of it."""
    wanted = requirements(extras)
    stamp = VENV / f".installed-{'-'.join(('base', *extras))}"
    digest = hashlib.sha256(
        "\n".join([*wanted, CONSTRAINTS.read_text(encoding="utf-8")]).encode()
    ).hexdigest()
    with one_at_a_time(ROOT / ".venv.lock"):
        if stamp.exists() and stamp.read_text(encoding="utf-8") == digest and PYTHON.exists():
            return
        require_disk(ROOT, INSTALL_BYTES)
        if not PYTHON.exists():
            say("Making the Python environment in .venv")
            make_venv()
        say("Installing pinned packages (the first time takes some minutes)")
        install(wanted)
        stamp.write_text(digest, encoding="utf-8")


def kernels_make() -> None:
    """Compile the processor kernels unless it was done from these sources; torch serves without.

    The build finds that out as well, but it has to import torch for it, which takes seconds.
    """
    digest = hashlib.sha256(CONSTRAINTS.read_bytes())
    for source in sorted((ROOT / "kernels" / "csrc").iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    stamp = VENV / ".kernels-built"
    is_there = any((ROOT / "kernels" / "_build").glob("*.so"))
    if is_there and stamp.exists() and stamp.read_text(encoding="utf-8") == digest.hexdigest():
        return
    command = [str(PYTHON), "-m", "kernels.build"]
    if subprocess.run(command, cwd=ROOT, check=False).returncode == 0:
        stamp.write_text(digest.hexdigest(), encoding="utf-8")


def requirements(extras: Sequence[str]) -> list[str]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    # pip itself too: a fresh environment starts with the one that came with Python.
    wanted = ["pip", *project["dependencies"]]
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    return wanted


def make_venv() -> None:
    try:
        venv.create(VENV, with_pip=True)
    except (subprocess.CalledProcessError, ImportError) as exc:
        shutil.rmtree(VENV, ignore_errors=True)
        raise StepFailed(
            f"The Python environment could not be made: {exc}.\n"
            "On Debian: apt-get install python3-venv, then run this again."
        ) from exc


def install(wanted: Sequence[str]) -> None:
    log = ROOT / ".venv" / "install.log"
    command = [
        *(str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"),
        *("--progress-bar", "off", "-c", str(CONSTRAINTS), *wanted),
    ]
    with log.open("w", encoding="utf-8") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False)
    if done.returncode == 0:
        return
    text = log.read_text(encoding="utf-8", errors="replace")
    raise StepFailed(
        f"Installing packages failed: {pip_reason(text)}\n"
        f"pip's last lines (all of them: {log}):\n  " + "\n  ".join(text.splitlines()[-5:])
    )


def pip_reason(text: str) -> str:
    if "No space left" in text:
        return "the disk is full. Free some space and run this again."
    signs = ("NewConnectionError", "name resolution", "Connection refused", "timed out")
    if any(sign in text for sign in signs):
        return "the package index could not be reached. Check the network, then run this again."
    return "see below. Mend it and run this again."


def require_disk(folder: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise StepFailed(
            f"The disk of {folder} has {free / 1024**3:.1f} GiB free; "
            f"{needed_bytes / 1024**3:.0f} GiB are needed. Free some space and run this again."
        )


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Two starts at once must not install into the same folder."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("Another start is installing; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ---- start


def start(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="deploy/start",
        description="Install what is missing, migrate, fetch the default model, serve.",
    )
    parser.add_argument("--port", type=int, help="port to listen on (default: 8000)")
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--data-dir", help="database, models, keys and logs (default: ./var)")
    options = parser.parse_args(arguments)
    if options.port is not None and not 1 <= options.port <= 65535:
        raise StepFailed(f"--port is {options.port}; a number from 1 to 65535 is allowed.")
    if options.data_dir:
        os.environ["APPLIANCE_DATA_DIR"] = str(Path(options.data_dir).expanduser().resolve())
    data_dir = Path(os.environ.get("APPLIANCE_DATA_DIR") or ROOT / "var")
    make_data_dir(data_dir)
    refuse_second_server(data_dir)
    environment_make(())
    kernels_make()
    # Other accounts of this machine have no business in the chats and keys made from here on.
    os.umask(0o077)
    prepare()
    serve = [str(PYTHON), "manage.py", "serve"]
    if options.host:
        serve += ["--host", options.host]
    if options.port is not None:
        serve += ["--port", str(options.port)]
    os.chdir(ROOT)
    # The server takes this process's place, so Ctrl-C and a service manager reach it directly.
    os.execv(serve[0], serve)


def prepare() -> None:
    """The database and the default model, side by side: neither needs the other."""
    tasks = {"Preparing the database": ["migrate", "--noinput", "-v", "0"]}
    if not os.environ.get("APPLIANCE_MODEL"):
        tasks["Preparing the default model"] = ["models", "ensure"]
    running = {
        what: subprocess.Popen([str(PYTHON), "manage.py", *arguments], cwd=ROOT)
        for what, arguments in tasks.items()
    }
    ended = {what: process.wait() for what, process in running.items()}
    for what, status in ended.items():
        if status:
            raise StepFailed(f"{what} failed (exit status {status}); the reason stands above.")


def make_data_dir(data_dir: Path) -> None:
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = data_dir / ".writable"
        probe.write_text("", encoding="utf-8")
        probe.unlink()
    except OSError as exc:
        raise StepFailed(
            f"The data folder {data_dir} cannot be written: {exc.strerror}.\n"
            "Choose another with --data-dir, or mend its owner and mode."
        ) from exc


def refuse_second_server(data_dir: Path) -> None:
    """Before packages and tables change under the server that runs; `serve` holds the lock."""
    path = data_dir / "serve.lock"
    if not path.exists():
        return
    with path.open("r+", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise StepFailed(
                f"A server (process {lock.read(20).strip() or 'unknown'}) already runs on the data "
                f"folder {data_dir}; nothing was changed.\n"
                "Stop it first, or choose another folder with --data-dir."
            ) from exc


# ---- test


Job = tuple[str, list[str]]
# More than half of their time the web tests wait for a server, a browser or a database.
JOBS_AT_ONCE = max(2, (os.cpu_count() or 2) // 2)


def test(arguments: Sequence[str]) -> int:
    """Every check and every test; goes on after a failure so that one run shows all."""
    debian_packages_make()
    environment_make(("test",))
    kernels_make()
    if arguments:
        return subprocess.run([*PYTEST, *arguments], cwd=ROOT, check=False).returncode
    jobs = [*suites(), *checks()]
    say(f"Running {len(jobs)} jobs, {JOBS_AT_ONCE} at once; each is shown when it has ended")
    with ThreadPoolExecutor(JOBS_AT_ONCE) as pool:
        passed = list(pool.map(passes, jobs))
    failed = [name for (name, _), good in zip(jobs, passed, strict=True) if not good]
    if failed:
        say(f"\nFailed: {', '.join(failed)}")
        return 1
    say("\nAll checks and tests passed.")
    return 0


def checks() -> list[Job]:
    bin_dir = VENV / "bin"
    manage = [str(PYTHON), "manage.py"]
    return [
        ("ruff", [str(bin_dir / "ruff"), "check", "."]),
        ("format", [str(bin_dir / "ruff"), "format", "--check", "."]),
        ("mypy", [str(bin_dir / "mypy")]),
        ("import contracts", [str(bin_dir / "lint-imports")]),
        ("system check", [*manage, "check", "--fail-level", "WARNING"]),
        ("migrations", [*manage, "makemigrations", "--check", "--dry-run"]),
    ]


def suites() -> list[Job]:
    """The longest first, so that none is left over at the end."""
    return [
        (
            "web tests on PostgreSQL and Redis",
            [*PYTEST, "-p", "tests.team_services", "-m", "not e2e", "tests/appliance"],
        ),
        ("web tests", [*PYTEST, "tests/appliance"]),
        ("engine tests", [*PYTEST, "tests", "--ignore=tests/appliance", "--ignore=tests/e2e"]),
        ("end-to-end tests", [*PYTEST, "tests/e2e"]),
        (
            "GPU kernels in Triton's interpreter",
            # Triton reads the variable when it is imported, hence a process of its own.
            [
                *("env", "TRITON_INTERPRET=1", *PYTEST, "-k", "triton"),
                *("tests/kernels", "tests/kernels_triton"),
            ],
        ),
        ("GPU script, small", ["env", f"PYTHON={PYTHON}", "tests/gpu/run.sh", "--small"]),
    ]


def passes(job: Job) -> bool:
    name, command = job
    begun = time.monotonic()
    done = subprocess.run(
        command,
        cwd=ROOT,
        check=False,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    ending = "passed" if done.returncode == 0 else f"FAILED (exit status {done.returncode})"
    say(f"\n== {name}: {ending} in {time.monotonic() - begun:.0f} s\n{done.stdout.rstrip()}")
    return done.returncode == 0


def debian_packages_make() -> None:
    """Install the browser and the servers that the tests start themselves, where missing."""
    missing = [name for name, signs in DEBIAN_PACKAGES.items() if not any(map(found, signs))]
    if not missing:
        return
    as_root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    say(f"Installing Debian packages for the tests: {' '.join(missing)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", *missing]):
        try:
            done = subprocess.run(
                [*as_root, *command],
                env=environment,
                check=False,
                stdout=subprocess.DEVNULL,
            )
            failed = done.returncode != 0
        except FileNotFoundError:
            failed = True
        if failed:
            raise StepFailed(
                f"The tests need {', '.join(missing)} and `{' '.join(command)}` failed. "
                "Install them as root, then run this again."
            )


def found(sign: str) -> bool:
    if sign.startswith("/"):
        return any(Path("/").glob(sign.lstrip("/")))
    return shutil.which(sign) is not None


def main() -> int:
    command, *arguments = sys.argv[1:]
    try:
        if command == "test":
            return test(arguments)
        start(arguments)
    except StepFailed as exc:
        print(f"\n{exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
