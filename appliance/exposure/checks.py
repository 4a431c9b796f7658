"""System checks: what the environment declares must be safe before anything starts."""

from typing import Any

from django.conf import settings
from django.core import checks

from appliance.errors import BadRequest
from appliance.exposure.host_names import check_host_name


@checks.register("exposure")
def check_allowed_hosts(app_configs: Any, **kwargs: Any) -> list[checks.CheckMessage]:
    found: list[checks.CheckMessage] = []
    for name in settings.APPLIANCE_ALLOWED_HOSTS:
        try:
            check_host_name(name.lower())
        except BadRequest as exc:
            found.append(
                checks.Error(
                    f"APPLIANCE_ALLOWED_HOSTS: {exc.message}",
                    hint="List the names that people type to reach the server.",
                    id="exposure.E001",
                )
            )
    return found
