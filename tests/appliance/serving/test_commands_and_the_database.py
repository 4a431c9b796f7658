"""No command of the product ends in a traceback because of its database: it says what to do."""

import sqlite3
from pathlib import Path

import pytest
from django.core.management import get_commands

from tests.appliance.serving.processes import manage

# What each needs to get as far as the database.
ARGUMENTS = {
    "serve": ("--port", "1"),
    "worker": (),
    "create_api_key": ("alice", "--name", "script"),
    "capacity": ("--url", "http://127.0.0.1:1/v1", "--keep"),
    "createsuperuser": ("--noinput", "--username", "alice", "--email", "a@team.example"),
    "changepassword": ("alice",),
    "clearsessions": (),
}
# The store of models is a folder and needs no database.
WITHOUT_DATABASE = {"models"}


def test_every_command_of_the_product_is_among_them() -> None:
    own = {name for name, app in get_commands().items() if app.startswith("appliance.")}
    assert own <= {*ARGUMENTS, *WITHOUT_DATABASE}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_on_an_empty_folder_it_says_to_migrate(name: str, tmp_path: Path) -> None:
    done = manage(tmp_path, name, *ARGUMENTS[name])
    assert done.returncode == 1
    assert f"data folder {tmp_path} is empty" in done.stderr
    assert "Run: manage.py migrate" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_on_a_schema_of_an_older_version_it_names_what_is_missing(data_dir: Path) -> None:
    with sqlite3.connect(data_dir / "blockhouse.sqlite3") as database:
        database.execute("DELETE FROM django_migrations WHERE app = 'console'")
        database.execute("DROP TABLE accounts_user")
    done = manage(data_dir, "changepassword", "alice")
    assert done.returncode == 1
    assert "changes of this version (the first is console.0001_initial)" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_is_no_database_is_told_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "blockhouse.sqlite3").write_bytes(b"no database at all" * 100)
    done = manage(tmp_path, "clearsessions")
    assert done.returncode == 1
    assert "not a database" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_database_that_is_not_there_is_told(tmp_path: Path) -> None:
    url = "postgresql://team:secret-word@127.0.0.1:1/blockhouse"
    done = manage(tmp_path, "clearsessions", DATABASE_URL=url)
    assert done.returncode == 1
    assert "Check DATABASE_URL" in done.stderr
    assert "secret-word" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_fault_can_still_be_seen_whole(tmp_path: Path) -> None:
    assert "Traceback" in manage(tmp_path, "clearsessions", "--traceback").stderr
