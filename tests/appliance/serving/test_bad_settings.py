"""A wrong boot setting ends every command with one line that names it, never a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("APPLIANCE_TIME_ZONE", "Mars/X"),
        ("APPLIANCE_TIME_ZONE", "../etc/passwd"),
        ("DATABASE_URL", "garbage"),
        ("DATABASE_URL", "mars://someone:secret@host/name"),
        ("APPLIANCE_PORT", "eighty"),
        ("APPLIANCE_DEVICE", "tpu"),
        ("APPLIANCE_DEBUG", "perhaps"),
        ("SECRET_KEY_FILE", "/nowhere/at/all"),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "manage.py", "check"],
        cwd=ROOT,
        env={**os.environ, "APPLIANCE_DATA_DIR": str(tmp_path), name: value},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert name in done.stderr
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr
