#!/usr/bin/env python
"""The product's commands: `manage.py help` lists them."""

import os
import sys


def main():
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "appliance.settings")
    try:
        from appliance.command_line import run
    except ModuleNotFoundError as exc:
        raise SystemExit(
            f"{exc}. Run deploy/start once: it makes .venv; then use .venv/bin/python manage.py."
        ) from exc
    run(sys.argv)


if __name__ == "__main__":
    main()
