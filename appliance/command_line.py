"""The edge of every `manage.py` command: a database that does not serve it is told in words."""

from collections.abc import Sequence

from django.conf import settings
from django.core.management import execute_from_command_line
from django.db import Error, connections


def run(arguments: Sequence[str]) -> None:
    """Run one command. `--traceback` shows a fault of the database as it was raised."""
    try:
        execute_from_command_line(list(arguments))
    except Error as exc:
        if "--traceback" in arguments:
            raise
        # With a text the exit status is 1.
        raise SystemExit(f"Error: {_words(exc)}") from exc


def _words(exc: Error) -> str:
    # Imported here: only a fault needs it.
    from appliance.serving.start import StartRefused, require_schema

    try:
        require_schema()
    except StartRefused as refused:
        return str(refused)
    if connections["default"].vendor == "sqlite":
        todo = f"Check the room on its disk, and the owner and mode of {settings.DATA_DIR}."
    else:
        todo = "Check DATABASE_URL, and that the database runs and takes changes."
    said = str(exc).strip().rstrip(".")
    return f"The database did not take this: {said}. {todo}"
