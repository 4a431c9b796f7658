import os
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from celery.platforms import SecurityWarning
from celery.signals import beat_embedded_init
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from appliance.celery import app
from appliance.serving.broker_files import broker_mend
from appliance.serving.start import StartRefused, require_schema

_LOOK_EVERY_S = 1.0


class Command(BaseCommand):
    help = (
        "Run the background worker with its clock. `serve` starts one by itself; it ends when the "
        "process that started it is gone."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--parent", type=int, help="process to end with; by default the one that started this"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        # A server that was killed before this line is no longer the parent: it has to be named.
        parent = options["parent"] or os.getppid()
        _watch(parent)
        # The clock is a process of the worker's own: without its worker it would tick for ever.
        worker = os.getpid()
        beat_embedded_init.connect(lambda **_: _watch(worker), weak=False)
        try:
            require_schema()
        except StartRefused as exc:
            raise CommandError(str(exc)) from exc
        # In a container root is the usual user; messages are JSON only, never pickles.
        warnings.simplefilter("ignore", SecurityWarning)
        # Redis has none.
        if options := getattr(settings, "CELERY_BROKER_TRANSPORT_OPTIONS", None):
            broker_mend(Path(options["control_folder"]), Path(options["data_folder_in"]))
        app.worker_main(
            [
                *(
                    "--quiet",
                    "worker",
                    "--pool=threads",
                    "--concurrency=2",
                    "--beat",
                    "--loglevel=WARNING",
                ),
                *("--without-gossip", "--without-mingle", "--without-heartbeat"),
            ]
        )


def _watch(parent: int) -> None:
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    """Who was killed cannot end its child, so the child looks."""
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)
