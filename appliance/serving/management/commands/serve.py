import logging
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from appliance.accounts.models import User
from appliance.accounts.services import setup_link_create
from appliance.env import env_is_set
from appliance.errors import BadRequest
from appliance.exposure.models import ExposureSettings
from appliance.exposure.services import exposure_check, exposure_install, exposure_settings
from appliance.quotas.services import quota_heal
from appliance.serving.live_settings import apply_saved, saved_settings
from appliance.serving.start import (
    StartRefused,
    address_write,
    data_dir_lock,
    listen,
    require_redis,
    require_schema,
    url_of,
)

logger = logging.getLogger(__name__)

# Printed as "set" or "unset", never as they are: they hold passwords.
_SECRETS = ("DATABASE_URL", "REDIS_URL", "SECRET_KEY")
_PLAIN = (
    "APPLIANCE_MODEL",
    "APPLIANCE_DEVICE",
    "APPLIANCE_DTYPE",
    "APPLIANCE_KV_DTYPE",
    "APPLIANCE_THREADS",
    "APPLIANCE_KV_MEMORY_MB",
    "APPLIANCE_DRAIN_SECONDS",
    "APPLIANCE_HUB_URL",
    "APPLIANCE_HUB_TOKEN_FILE",
    "APPLIANCE_ALLOWED_HOSTS",
    "APPLIANCE_LEDGER_DAYS",
    "APPLIANCE_TIME_ZONE",
    "APPLIANCE_LOG_LEVEL",
    "APPLIANCE_DEBUG",
)


class Command(BaseCommand):
    help = (
        "Serve: engine and web server in this process, one background worker beside it. Prints "
        "one line `ready: URL` when requests can come."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--host", help="address to listen on, this time only")
        parser.add_argument("--port", type=int, help="port to listen on, this time only")
        parser.add_argument(
            "--no-worker",
            action="store_true",
            help="do not start the background worker; somebody else runs `manage.py worker`",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            with data_dir_lock(settings.DATA_DIR):
                status = self._serve(options)
        except (StartRefused, BadRequest) as exc:
            raise CommandError(str(exc)) from exc
        if status:
            raise SystemExit(status)

    def _serve(self, options: dict[str, Any]) -> int:
        require_schema()
        require_redis()
        exposure = self._exposure(options)
        policy = exposure_install(exposure)
        listening = listen(exposure.bind_host, exposure.port)
        url = url_of(exposure.bind_host, exposure.port, policy.hosts)
        address_write(settings.DATA_DIR, exposure.bind_host, exposure.port)
        self._say_settings(exposure, options)
        if healed := quota_heal(all_others=True):
            logger.info("gave back the tokens of %s answers that a stop cut off", healed)
        if not User.objects.exists():
            self._say(f"set-up: {url.rstrip('/')}{setup_link_create()}")
            self._say("Open this link once to choose the first admin's name and password.")

        # Imported here: they bring the reactor and the engine, which nothing above needs in order
        # to refuse. The routes come by their setting, as they lie above this app.
        from channels.routing import get_default_application

        from appliance.serving.engine_backend import EngineBackend
        from appliance.serving.server import ApplianceServer
        from appliance.serving.web_server import WebServer
        from appliance.serving.worker_process import WorkerProcess

        backend = EngineBackend.from_settings()
        apply_saved(backend, saved_settings())
        server = ApplianceServer(
            WebServer(get_default_application(), listening),
            backend,
            None if options["no_worker"] else WorkerProcess(),
            url=url,
            drain_s=settings.APPLIANCE_DRAIN_SECONDS,
            say=self._say,
        )
        return server.run()

    def _exposure(self, options: dict[str, Any]) -> ExposureSettings:
        """The saved settings with this start's own address; refused when that is not safe."""
        exposure = exposure_settings()
        if options["host"] is not None:
            exposure.bind_host = options["host"]
        if options["port"] is not None:
            exposure.port = options["port"]
        exposure_check(exposure)
        return exposure

    def _say(self, text: str) -> None:
        self.stdout.write(text)
        self.stdout.flush()

    def _say_settings(self, exposure: ExposureSettings, options: dict[str, Any]) -> None:
        rows = [
            ("APPLIANCE_DATA_DIR", str(settings.DATA_DIR), _source("APPLIANCE_DATA_DIR")),
            ("address", exposure.bind_host, "--host" if options["host"] else "exposure settings"),
            ("port", str(exposure.port), "--port" if options["port"] else "exposure settings"),
        ]
        for name in _PLAIN:
            value = getattr(settings, name, getattr(settings, name.removeprefix("APPLIANCE_"), ""))
            shown = ", ".join(value) if isinstance(value, list) else str(value)
            rows.append((name, shown or "-", _source(name)))
        for name in _SECRETS:
            rows.append((name, "set" if getattr(settings, name) else "unset", _source(name)))
        for name, value, source in rows:
            self._say(f"  {name:<25} {value}  ({source})")


def _source(name: str) -> str:
    if env_is_set(name):
        return "environment"
    if env_is_set(f"{name}_FILE"):
        return "file"
    return "data folder" if name == "SECRET_KEY" else "default"
