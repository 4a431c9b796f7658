from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from appliance.errors import ApplianceError
from appliance.serving.model_store import (
    ModelRow,
    model_ensure,
    model_import,
    model_pull,
    model_use,
    models_list,
)


class Command(BaseCommand):
    help = "Show, fetch, import and choose the models of this server."
    # The store is a folder; a database that is not there yet is no reason to refuse.
    requires_system_checks = []
    requires_migrations_checks = False

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        actions.add_parser("list", help="what is here, and what can be fetched")
        pull = actions.add_parser(
            "pull", help="fetch a model by its name, or ORG/MODEL[@REVISION][:FILE.gguf] of the hub"
        )
        pull.add_argument("name", metavar="NAME")
        taken = actions.add_parser("import", help="take in a .gguf file or a model folder")
        taken.add_argument("path", metavar="PATH", type=Path)
        for long_one in (pull, taken):
            long_one.add_argument(
                "--every-percent", action="store_true", help="tell the progress in single steps"
            )
        taken.add_argument("--name", help="what to call it (default: from the file's name)")
        actions.add_parser("ensure", help="have the model that the next start serves")
        use = actions.add_parser("use", help="serve this model from the next start on")
        use.add_argument("name", metavar="NAME")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            match options["action"]:
                case "list":
                    self._list()
                case "pull":
                    self._done(model_pull(options["name"], self._progress(options), self._note))
                case "import":
                    progress = self._progress(options)
                    self._done(model_import(options["path"], options["name"], progress))
                case "ensure":
                    self._done(model_ensure(self._progress(options)))
                case "use":
                    model_use(options["name"])
                    self._chosen(options["name"])
        except ApplianceError as exc:
            raise CommandError(exc.message) from exc

    def _list(self) -> None:
        rows = models_list()
        width = max(len(row.name) for row in rows) if rows else 0
        for row in rows:
            mark = "*" if row.is_selected else " "
            self.stdout.write(f"{mark} {row.name:<{width}}  {_described(row)}".rstrip())

    def _done(self, folder: Path) -> None:
        self.stdout.write(f"{folder.name} is ready in {folder}")

    def _chosen(self, name: str) -> None:
        self.stdout.write(f"{name} is served from the next start on.")
        if settings.APPLIANCE_MODEL:
            self.stdout.write(
                f"APPLIANCE_MODEL is set to {settings.APPLIANCE_MODEL} and goes first; unset it "
                "for this choice to count."
            )

    def _note(self, text: str) -> None:
        self.stderr.write(f"note: {text}")

    def _progress(self, options: dict[str, Any]) -> "_Progress":
        return _Progress(self, 100 if options.get("every_percent") else 10)


class _Progress:
    """Prints each new step, and every so many parts of it."""

    def __init__(self, command: BaseCommand, parts: int) -> None:
        self._command = command
        self._parts = parts
        self._last = ("", -1)

    def __call__(self, share: float, what: str) -> None:
        now = (what, int(share * self._parts))
        if now != self._last:
            self._last = now
            self._command.stderr.write(f"{share:4.0%} {what}")


def _described(row: ModelRow) -> str:
    megabytes = f"{row.num_bytes / 1e6:,.0f} MB"
    if row.is_here:
        return f"{megabytes}, {row.context_tokens:,} tokens of context, {row.architecture}"
    return f"not here; needs {megabytes} while it is fetched: models pull {row.name}"
