import argparse
import re
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from appliance.accounts.models import User
from appliance.api_keys.networks import networks_parse
from appliance.api_keys.services import api_key_issue
from appliance.errors import ApplianceError

_UNITS = {"h": "hours", "d": "days", "w": "weeks"}


def life(text: str) -> timedelta:
    """`90d`, `12h`, `4w`."""
    got = re.fullmatch(r"([1-9]\d{0,5})([hdw])", text)
    if got is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; examples: 12h, 90d, 4w")
    return timedelta(**{_UNITS[got[2]]: int(got[1])})


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _owner(username: str) -> User:
    """The wrong data folder is the likely fault, as only the server's start is told of another."""
    owner = User.objects.filter(username=username).first()
    if owner is None:
        raise CommandError(
            f"There is no user {username!r} in the data folder {settings.DATA_DIR}; "
            "APPLIANCE_DATA_DIR names another."
        )
    return owner


class Command(BaseCommand):
    help = "Make an API key. The key alone is printed on standard output, once."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("username", help="whose key it is")
        parser.add_argument("--name", required=True, help="what will use it")
        parser.add_argument(
            "--scopes", default="chat,models", help="of chat,models,admin (default: chat,models)"
        )
        parser.add_argument(
            "--models", default="", help="names of models it may use, with commas (default: all)"
        )
        parser.add_argument(
            "--networks", default="", help="10.0.0.0/8,192.0.2.7: where it may be used from"
        )
        parser.add_argument("--expires", type=life, help="12h, 90d, 4w (default: no end)")

    def handle(self, *args: Any, **options: Any) -> None:
        owner = _owner(options["username"])
        try:
            _, secret = api_key_issue(
                owner,
                options["name"],
                _names(options["scopes"]),
                options["expires"],
                allowed_models=_names(options["models"]),
                allowed_networks=networks_parse(options["networks"]),
            )
        except ApplianceError as exc:
            raise CommandError(exc.message) from exc
        self.stdout.write(secret)
