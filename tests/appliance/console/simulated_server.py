"""The whole web product over the simulated engine, to drive the console in a browser.

    APPLIANCE_DATA_DIR=/tmp/demo python -m tests.appliance.console.simulated_server 8001

prints one JSON line when it listens. `--blocks` and `--slots` size the pool; standard input takes
an engine state (ready, loading, draining, dead) a line, or `notice` and why it is slow.
"""

import argparse
import asyncio
import json
import os
import sys
from typing import Any

PASSWORD = "nine-Lanterns-burn"
NAMES = ("alice", "bob", "carol", "dave", "erin", "frank", "grace", "heidi", "ivan", "judy")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--blocks", type=int, default=4096)
    parser.add_argument("--slots", type=int, default=12)
    parser.add_argument("--arrivals", type=float, default=0.4)
    options = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "appliance.settings")
    # Installs the event loop's reactor, so it comes before everything else.
    from daphne.server import Server

    engine = _set_up(options)
    from twisted.internet import reactor

    from appliance.asgi import application

    tasks: list[Any] = []

    def begin() -> None:
        loop = asyncio.get_event_loop()
        tasks.append(loop.create_task(_run(engine)))
        tasks.append(loop.run_in_executor(None, _obey, engine))
        print(json.dumps({"listening": options.port, "users": NAMES}), flush=True)

    reactor.callWhenRunning(begin)
    endpoint = f"tcp:port={options.port}:interface=127.0.0.1"
    Server(application=application, endpoints=[endpoint], verbosity=0).run()


def _set_up(options: argparse.Namespace) -> Any:
    import django

    django.setup()
    from django.core.management import call_command

    from appliance.accounts.models import User
    from appliance.accounts.services import user_create
    from appliance.serving.gateway import gateway_install
    from tests.appliance.console.simulated_backend import SimulatedBackend

    call_command("migrate", verbosity=0, interactive=False)
    for name in NAMES:
        if not User.objects.filter(username=name).exists():
            user_create(name, password=PASSWORD, is_admin=name in ("alice", "carol"))
    owners = [(str(pk), name) for pk, name in User.objects.values_list("pk", "username")]
    engine = SimulatedBackend(
        owners, total=options.blocks, slots=options.slots, arrivals_per_s=options.arrivals
    )
    engine.advance(60)
    gateway_install(engine)
    return engine


async def _run(engine: Any) -> None:
    from appliance.serving.gateway import gateway_serving

    gateway_serving()
    await engine.run()


def _obey(engine: Any) -> None:
    for line in sys.stdin:
        word, is_notice, notice = line.strip().partition("notice ")
        if is_notice or not word:
            engine.notice = notice
        else:
            engine.status = word


if __name__ == "__main__":
    main()
