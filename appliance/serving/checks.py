"""System checks of what serving needs of its environment."""

import difflib
import os
from importlib.metadata import distributions
from typing import Any

from django.conf import settings
from django.core import checks

from appliance.env import env_unknown

# Our packages. Distributions of these names, installed beside them, would be imported instead, and
# libraries that look for them would take ours for theirs.
OUR_PACKAGES = frozenset({"kernels", "inference", "appliance"})


@checks.register("serving")
def check_no_namesakes(app_configs: Any, **kwargs: Any) -> list[checks.CheckMessage]:
    installed = {(found.metadata["Name"] or "").lower() for found in distributions()}
    return [
        checks.Error(
            f"A distribution named {name} is installed; the product has a package of that name.",
            hint=f"Remove it: pip uninstall {name}. Best give the product an environment of its "
            "own, as deploy/start does.",
            id="serving.E001",
        )
        for name in sorted(installed & OUR_PACKAGES)
    ]


@checks.register("serving")
def check_data_dir(app_configs: Any, **kwargs: Any) -> list[checks.CheckMessage]:
    if os.access(settings.DATA_DIR, os.W_OK | os.X_OK):
        return []
    return [
        checks.Error(
            f"The data folder {settings.DATA_DIR} cannot be written.",
            hint="Mend its owner and mode, or choose another with APPLIANCE_DATA_DIR.",
            id="serving.E002",
        )
    ]


@checks.register("serving")
def check_environment_names(app_configs: Any, **kwargs: Any) -> list[checks.CheckMessage]:
    known = [name for name in dir(settings) if name.startswith("APPLIANCE_")]
    known.append("APPLIANCE_DATA_DIR")
    found: list[checks.CheckMessage] = []
    for name in env_unknown("APPLIANCE_"):
        near = difflib.get_close_matches(name, known, n=1)
        found.append(
            checks.Error(
                f"The environment sets {name}, which is no setting, so it would have no effect.",
                hint=f"Did you mean {near[0]}?" if near else "deploy/env.example lists them all.",
                id="serving.E003",
            )
        )
    return found
