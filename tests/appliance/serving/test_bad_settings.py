"""A wrong boot setting ends every command with one line that names it, never a traceback."""

from pathlib import Path

import pytest

from tests.appliance.serving import processes


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
        ("APPLIANCE_DATA_DIR", "/dev/null"),
        ("APPLIANCE_DATA_DIR", "/proc/nowhere"),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: str, tmp_path: Path) -> None:
    said = manage("check", **{"APPLIANCE_DATA_DIR": str(tmp_path), name: value})
    assert name in said
    assert "secret" not in said


def test_a_key_for_the_wrong_data_folder_names_the_folder(tmp_path: Path) -> None:
    said = manage("create_api_key", "alice", "--name", "x", APPLIANCE_DATA_DIR=str(tmp_path))
    assert str(tmp_path) in said
    assert "APPLIANCE_DATA_DIR" in said


def manage(*arguments: str, **changes: str) -> str:
    """What a command that fails says; never a traceback."""
    done = processes.manage(changes.pop("APPLIANCE_DATA_DIR"), *arguments, **changes)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done.stderr
