"""What `manage.py serve` refuses, each with what is wrong and what to do."""

import os
import socket

import pytest
from django.core.management import CommandError, call_command

from appliance.accounts.services import user_create
from appliance.serving.start import StartRefused, data_dir_lock, listen, url_of
from tests.e2e.server import free_port

pytestmark = pytest.mark.django_db


def test_a_second_server_on_the_same_data_is_refused_and_names_the_first(settings):
    refusal = pytest.raises(CommandError, match=f"process {os.getpid()}.*already runs")
    with data_dir_lock(settings.DATA_DIR), refusal:
        call_command("serve", port=free_port())
    with data_dir_lock(settings.DATA_DIR):
        pass


def test_two_data_folders_do_not_meet(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with data_dir_lock(tmp_path / "a"), data_dir_lock(tmp_path / "b"):
        pass


def test_a_data_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(StartRefused, match="cannot be written"), data_dir_lock(tmp_path / "gone"):
        pass


def test_a_taken_port_is_named_c21():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(CommandError, match=r"is in use .*--port"):
            call_command("serve", port=taken.getsockname()[1])


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("203.0.113.77", "no admin yet"),
        ("0.0.0.0", "no admin yet"),
        ("::", "no admin yet"),
        ("", "no address to listen on"),
        ("box.example", "no address to listen on"),
    ],
)
def test_an_unsafe_or_wrong_address_is_refused_c21(host, said):
    with pytest.raises(CommandError, match=said):
        call_command("serve", host=host, port=free_port())


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_that_is_none_is_refused_c21(port):
    with pytest.raises(CommandError, match=f"{port} is no port"):
        call_command("serve", port=port)


def test_an_address_of_another_machine_is_refused_c21(settings):
    user_create("alice", is_admin=True)
    settings.APPLIANCE_ALLOWED_HOSTS = ["box.example"]
    with pytest.raises(CommandError, match="no address of this machine"):
        call_command("serve", host="203.0.113.77", port=free_port())


def test_all_addresses_take_both_families():
    with listen("::", 0) as listening:
        port = listening.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), timeout=10).close()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000/"),
        ("localhost", "http://localhost:8000/"),
        ("::1", "http://[::1]:8000/"),
        ("0.0.0.0", "http://box.example:8000/"),
        ("::", "http://box.example:8000/"),
    ],
)
def test_the_printed_address_works_in_a_browser(host, url):
    assert url_of(host, 8000, ("localhost", ".team.example", "box.example")) == url
