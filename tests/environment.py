"""Pytest plugin, loaded first: tests never touch the data folder or the settings of a person.

Run tests as `python -m pytest`, so that this file is found before Django reads its settings.
"""

import os
import shutil
import tempfile

_folder = tempfile.mkdtemp(prefix="blockhouse-test-")

for _name in [name for name in os.environ if name.startswith("APPLIANCE_")]:
    del os.environ[_name]
for _name in ("DATABASE_URL", "REDIS_URL", "SECRET_KEY", "SECRET_KEY_FILE"):
    os.environ.pop(_name, None)
os.environ["APPLIANCE_DATA_DIR"] = _folder


def pytest_unconfigure() -> None:
    shutil.rmtree(_folder, ignore_errors=True)
