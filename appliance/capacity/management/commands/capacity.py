import asyncio
import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from django.core.management.base import BaseCommand, CommandError, CommandParser

from appliance.accounts.models import User
from appliance.api_keys.services import api_key_revoke
from appliance.capacity.figures import Level
from appliance.capacity.load import Target, base_url, first_model
from appliance.capacity.mix import PRESETS, TEAM, Mix
from appliance.capacity.plan import MAX_LEVEL_S, MIN_LEVEL_S, Plan, parse_levels
from appliance.capacity.recommend import Limits, advise
from appliance.capacity.runner import CapacityTest, RunStopped
from appliance.capacity.selectors import mix_named
from appliance.capacity.services import key_issue, own_server, run_keep
from appliance.capacity.table import as_csv, table
from appliance.capacity.tasks import LedgerWatcher
from appliance.errors import ApplianceError
from appliance.serving.start import StartRefused, require_schema

_BAR = 24


class Command(BaseCommand):
    help = (
        "Load a server with N users at the same time, for several N, and say how many it serves "
        "well. Without --url: the server that runs on this data folder, with a key of its own."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        add = parser.add_argument
        add("--url", help="another OpenAI-compatible server, like http://host:8000/v1")
        add("--api-key", default="", help="key for --url")
        add("--model", default="", help="model to ask for (default: the first the server names)")
        add("--levels", default="1,2,4,8", help="users at the same time (default: 1,2,4,8)")
        add("--mix", default="chat", choices=[*PRESETS, TEAM], help="kind of request")
        add("--seconds", type=float, default=30.0, help="for each level (default: 30)")
        add("--max-ttft", type=float, default=2.0, help="p95 of the first token, s (default: 2)")
        add("--max-itl", type=float, default=100.0, help="p95 between tokens, ms (default: 100)")
        add("--min-speed", type=float, default=0.0, help="tokens/s for each user (default: any)")
        add(
            "--raise-slots", action="store_true", help="as many slots as users; set back at the end"
        )
        add("--low-priority", action="store_true", help="members' requests go first")
        add("--user", help="admin whose quota pays, without --url (default: the first admin)")
        add("--json", help="also write the figures to this file, as JSON")
        add("--csv", help="also write the figures to this file, as CSV")
        add(
            "--keep",
            action="store_true",
            help="also put the result among the tests of the console, to compare it there",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            if options["keep"]:
                # Before minutes of a test whose result could not be kept.
                require_schema()
            plan = _plan(options)
            mix = mix_named(plan.mix)
            levels, model = self._measured(plan, mix, options)
        except (ApplianceError, RunStopped, StartRefused) as exc:
            raise CommandError(getattr(exc, "message", str(exc))) from exc
        except KeyboardInterrupt:
            raise CommandError("Stopped.") from None
        advice = advise(levels, plan.limits)
        self.stdout.write(table(levels, plan.limits))
        self.stdout.write(f"\n{advice.title}. {advice.text}")
        slots = min((one.slots for one in levels if one.slots is not None), default=None)
        if slots is not None and slots < max(one.users for one in levels):
            self.stdout.write(
                f"{slots} slots run here: above that the test measures waiting. Give --raise-slots."
            )
        told = {
            "plan": plan.as_dict(),
            "levels": [level.as_dict() for level in levels],
            **asdict(advice),
        }
        _write(options["json"], json.dumps(told, indent=1))
        _write(options["csv"], as_csv(levels, plan.limits))

        if options["keep"]:
            server = urlsplit(base_url(options["url"])).netloc if options["url"] else ""
            facts = {"median_prompt": mix.median_prompt, "median_answer": mix.median_answer}
            run_keep(plan, levels, {**facts, "model": model, "server": server}, by="a terminal")

    def _measured(self, plan: Plan, mix: Mix, options: dict[str, Any]) -> tuple[list[Level], str]:
        """The levels, and the name of the model that answered."""
        with _target(options) as (target, key_id, pid):
            watcher = _Terminal(self, key_id)
            test = _test(target, mix, plan, watcher, is_own=key_id is not None, server_pid=pid)
            try:
                return asyncio.run(test)
            finally:
                watcher.clear()


async def _test(
    target: Target, mix: Mix, plan: Plan, watcher: Any, **own: Any
) -> tuple[list[Level], str]:
    if not target.model:
        target = replace(target, model=await first_model(target))
    return await CapacityTest(target, mix, plan, watcher, **own).run(), target.model


class _Terminal(LedgerWatcher):
    """A line on standard error, written over; where that is no terminal, a line a level."""

    def __init__(self, command: BaseCommand, key_id: int | None) -> None:
        super().__init__(key_id or 0)
        self._stderr, self._is_terminal = command.stderr, command.stderr.isatty()
        self._has_line = False

    async def progress(self, told: dict[str, Any]) -> None:
        if not self._is_terminal or not told["users"]:
            return
        full = round(_BAR * told["share"])
        self._has_line = True
        self._stderr.write(
            f"\r[{'#' * full}{'.' * (_BAR - full)}] level {told['level']} of {told['levels']}: "
            f"{told['users']} at the same time, {told['answered']} answered, "
            f"{told['errors']} failed   ",
            ending="",
        )
        self._stderr.flush()

    async def level_done(self, level: Level) -> None:
        if not self._is_terminal:
            self._stderr.write(f"{level.users} at the same time: {level.requests} requests")

    async def slots_held(self, held: dict[str, Any] | None) -> None:
        return None

    def clear(self) -> None:
        if self._has_line:
            self._stderr.write("\r\x1b[K", ending="")


def _plan(options: dict[str, Any]) -> Plan:
    if not MIN_LEVEL_S <= options["seconds"] <= MAX_LEVEL_S:
        raise CommandError(f"--seconds is {options['seconds']:g}; 1 to 600 is allowed.")
    for name in ("max_ttft", "max_itl", "min_speed"):
        if not 0 <= options[name] < float("inf"):
            raise CommandError(f"--{name.replace('_', '-')} must be a number from 0 on.")
    return Plan(
        mix=options["mix"],
        levels=parse_levels(options["levels"]),
        level_s=options["seconds"],
        limits=Limits(
            ttft_p95_s=options["max_ttft"] or None,
            itl_p95_s=options["max_itl"] / 1000 or None,
            user_tokens_per_s=options["min_speed"] or None,
        ),
        stops_at_limit=False,
        is_low_priority=options["low_priority"],
        raises_slots=options["raise_slots"],
    )


@contextlib.contextmanager
def _target(options: dict[str, Any]) -> Iterator[tuple[Target, int | None, int | None]]:
    """Where to, with the key's id and the server's process when it is the own one."""
    if options["url"]:
        yield Target(base_url(options["url"]), options["api_key"], options["model"]), None, None
        return
    if options["api_key"]:
        raise CommandError("--api-key goes with --url; the own server gets a key of its own.")
    url, pid = own_server()
    key, secret = key_issue(_admin(options["user"]), is_low_priority=options["low_priority"])
    try:
        yield Target(url, secret, options["model"]), key.pk, pid
    finally:
        api_key_revoke(key)


def _admin(name: str | None) -> User:
    admins = User.objects.filter(is_active=True, is_staff=True).order_by("pk")
    admin = (admins if name is None else admins.filter(username=name)).first()
    if admin is None:
        who = "There is no admin" if name is None else f"There is no admin {name!r}"
        raise CommandError(f"{who}. Make one first, or name one with --user.")
    return admin


def _write(path: str | None, text: str) -> None:
    if not path:
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise CommandError(f"{path} cannot be written: {exc.strerror}.") from exc
