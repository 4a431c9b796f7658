"""Admins decide where the server listens and who reaches it; unsafe choices are refused (C21)."""

import pytest
from django.core.management import call_command
from django.core.management.base import SystemCheckError

from appliance.errors import BadRequest
from appliance.exposure.models import ExposureSettings
from appliance.exposure.policy import PRIVATE_NETWORKS, parse_address, policy_current
from appliance.exposure.services import (
    exposure_change,
    exposure_check,
    exposure_policy,
    exposure_settings,
)


@pytest.fixture(autouse=True)
def nothing_declared(own_policy, settings):
    settings.APPLIANCE_ALLOWED_HOSTS = []


def test_the_first_start_takes_the_environment_and_later_ones_the_row(db, settings):
    settings.APPLIANCE_HOST, settings.APPLIANCE_PORT = "127.0.0.1", 8123
    assert exposure_settings().port == 8123
    settings.APPLIANCE_PORT = 9999
    assert exposure_settings().port == 8123
    assert ExposureSettings.objects.count() == 1


def test_the_default_listens_to_this_machine_only_c21(db):
    row = exposure_settings()
    exposure_check(row)
    assert row.bind_host == "127.0.0.1"
    assert exposure_policy(row).hosts == ("localhost", "127.0.0.1", "[::1]")


def test_an_open_bind_needs_an_admin_and_a_name_c21(db, bob):
    open_bind = {"bind_host": "0.0.0.0", "allowed_hosts": ["box.example"]}
    with pytest.raises(BadRequest, match="no admin yet"):
        exposure_change(bob, **open_bind)
    bob.is_staff = True
    bob.save()
    with pytest.raises(BadRequest, match="no name is declared"):
        exposure_change(bob, bind_host="0.0.0.0")
    assert exposure_settings().bind_host == "127.0.0.1"
    row = exposure_change(bob, **open_bind)
    assert (row.bind_host, row.changed_by) == ("0.0.0.0", bob)
    bob.is_active = False
    bob.save()
    with pytest.raises(BadRequest, match="no admin yet"):
        exposure_check(row)


def test_an_open_bind_admits_private_networks_only_unless_named(alice):
    row = exposure_change(alice, bind_host="::", allowed_hosts=["box.example"])
    policy = exposure_policy(row)
    assert policy.networks == PRIVATE_NETWORKS
    assert policy.admits(parse_address("192.168.7.7"))
    assert policy.admits(parse_address("::1"))
    assert not policy.admits(parse_address("8.8.8.8"))
    row = exposure_change(alice, allowed_networks=["8.8.8.0/24"])
    assert exposure_policy(row).admits(parse_address("8.8.8.8"))


def test_names_of_the_environment_always_count(alice, settings):
    settings.APPLIANCE_ALLOWED_HOSTS = ["Box.Example"]
    exposure_change(alice, bind_host="10.1.2.3")
    assert policy_current().hosts[3:] == ("10.1.2.3", "box.example")


def test_a_change_counts_at_once_c13(alice, settings):
    exposure_change(alice, allowed_hosts=[" Team.Example "], trusted_proxies=["10.0.0.1"])
    assert "team.example" in policy_current().hosts
    assert list(policy_current().hosts) == settings.ALLOWED_HOSTS
    assert policy_current().proxies


def test_a_change_that_shuts_its_author_out_is_refused(alice):
    with pytest.raises(BadRequest, match="shut you out"):
        exposure_change(alice, client_address="10.1.1.1", allowed_networks=["10.2.0.0/16"])
    assert exposure_settings().allowed_networks == []
    exposure_change(alice, client_address="10.1.1.1", allowed_networks=["10.0.0.0/8"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", 0),
        ("port", 65536),
        ("port", True),
        ("port", "8000"),
        ("bind_host", ""),
        ("bind_host", "box.example"),
        ("bind_host", "999.1.1.1"),
        ("bind_host", None),
        ("allowed_hosts", ["*"]),
        ("allowed_hosts", ["box.example:8000"]),
        ("allowed_hosts", ["http://box.example"]),
        ("allowed_hosts", ["box example"]),
        ("allowed_hosts", ["caf\xe9.example"]),
        ("allowed_hosts", [""]),
        ("allowed_hosts", [5]),
        ("allowed_hosts", "box.example"),
        ("allowed_hosts", ["x.example"] * 101),
        ("allowed_networks", ["10.0.0.5/8"]),
        ("allowed_networks", ["ten"]),
        ("allowed_networks", [10]),
        ("trusted_proxies", ["proxy.example"]),
        ("colour", "red"),
    ],
)
def test_malformed_values_change_nothing(alice, field, value):
    before = exposure_settings()
    with pytest.raises(BadRequest):
        exposure_change(alice, **{field: value})
    assert exposure_settings().changed_at == before.changed_at


@pytest.mark.parametrize(
    "name",
    [".com", ".local", ".internal", ".co.uk", ".com.au", ".nip.io", ".github.io", ".home.arpa"],
)
def test_a_suffix_under_which_anybody_owns_names_is_refused_c13(db, name, settings):
    with pytest.raises(BadRequest, match="anybody can own") as refused:
        exposure_change(None, allowed_hosts=[name.upper()])
    assert refused.value.param == "allowed_hosts"
    assert exposure_settings().allowed_hosts == []
    settings.APPLIANCE_ALLOWED_HOSTS = [name]
    with pytest.raises(SystemCheckError, match="anybody can own"):
        call_command("check")


def test_an_address_within_its_network_is_refused_with_the_network_that_was_meant(alice):
    with pytest.raises(BadRequest, match=r"Its network is 10\.0\.0\.0/8\."):
        exposure_change(alice, allowed_networks=["10.0.0.5/8"])


@pytest.mark.parametrize("name", [".team.co.uk", ".corp.example", "co.uk", "blockhouse.co.uk"])
def test_a_teams_own_domain_is_taken_whatever_it_ends_in(db, name):
    assert exposure_change(None, allowed_hosts=[name]).allowed_hosts == [name]


@pytest.mark.parametrize("name", ["box", "box.example", ".team.example", "10.1.2.3", "[fd00::1]"])
def test_names_people_use_are_taken(alice, name):
    exposure_change(alice, allowed_hosts=[name])
    assert name in policy_current().hosts


def test_the_check_command_names_a_bad_host_c13(settings):
    settings.APPLIANCE_ALLOWED_HOSTS = ["*"]
    with pytest.raises(SystemCheckError, match=r"exposure\.E001"):
        call_command("check")
