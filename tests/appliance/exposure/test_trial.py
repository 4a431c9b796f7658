"""A change that may shut somebody out is taken back by itself unless an admin keeps it."""

import time
from datetime import timedelta

import pytest
from django.utils import timezone

from appliance.console.models import AuditRecord
from appliance.errors import BadRequest, Conflict
from appliance.exposure import policy as policy_module
from appliance.exposure.models import ExposureTrial
from appliance.exposure.policy import parse_address, policy_current, policy_install, policy_remove
from appliance.exposure.services import (
    exposure_change,
    exposure_install,
    exposure_settings,
    exposure_trial,
    exposure_trial_keep,
    exposure_trial_take_back,
)

HERE = parse_address("10.1.1.1")
OFFICE = ["10.0.0.0/8"]


@pytest.fixture(autouse=True)
def nothing_declared(own_policy, settings):
    settings.APPLIANCE_ALLOWED_HOSTS = []


def later(monkeypatch, seconds):
    """Move both clocks: the one of the checks and the one of the database."""
    now, monotonic = timezone.now(), time.monotonic()
    monkeypatch.setattr(policy_module.time, "monotonic", lambda: monotonic + seconds)
    monkeypatch.setattr(timezone, "now", lambda: now + timedelta(seconds=seconds))


def test_a_change_that_shuts_nobody_out_is_not_on_trial(alice):
    exposure_change(alice, trial_s=60, allowed_hosts=["box.example"])
    exposure_change(alice, trial_s=60, allowed_networks=OFFICE)
    exposure_trial_keep(alice)
    exposure_change(alice, trial_s=60, allowed_networks=[*OFFICE, "192.168.0.0/16"])
    assert exposure_trial() is None


@pytest.mark.parametrize(
    "change",
    [
        {"allowed_hosts": []},
        {"allowed_networks": ["10.0.0.0/16"]},
        {"trusted_proxies": ["10.1.1.9"]},
    ],
)
def test_a_change_that_may_shut_somebody_out_is_on_trial(alice, change):
    exposure_change(alice, allowed_hosts=["box.example"], allowed_networks=OFFICE)
    exposure_change(alice, trial_s=60, **change)
    assert list(exposure_trial().after) == list(change)


def test_it_holds_at_once_and_is_taken_back_when_the_time_is_over(alice, monkeypatch):
    exposure_change(alice, trial_s=60, allowed_networks=["192.168.0.0/16"])
    assert not policy_current().admits(HERE)
    later(monkeypatch, 61)
    # The checks go back by themselves, before anybody reads the database.
    assert policy_current().admits(HERE)
    assert ExposureTrial.objects.exists()
    assert exposure_settings().allowed_networks == []
    assert exposure_trial() is None
    record = AuditRecord.objects.first()
    assert (record.action, record.actor_name) == ("exposure.take_back", "the server")
    assert record.detail == {
        "before": {"allowed_networks": ["192.168.0.0/16"]},
        "after": {"allowed_networks": []},
    }


def test_a_kept_change_stays(alice, monkeypatch):
    exposure_change(alice, trial_s=60, allowed_networks=["192.168.0.0/16"])
    exposure_trial_keep(alice)
    later(monkeypatch, 61)
    assert not policy_current().admits(HERE)
    assert exposure_settings().allowed_networks == ["192.168.0.0/16"]


def test_taking_back_by_hand_and_twice(alice):
    exposure_change(alice, trial_s=60, allowed_networks=["192.168.0.0/16"])
    exposure_trial_take_back(alice)
    assert policy_current().admits(HERE)
    for act in (exposure_trial_take_back, exposure_trial_keep):
        with pytest.raises(Conflict, match="Nothing is on trial"):
            act(alice)


def test_keeping_too_late_is_refused(alice, monkeypatch):
    exposure_change(alice, trial_s=60, allowed_networks=["192.168.0.0/16"])
    later(monkeypatch, 61)
    with pytest.raises(Conflict, match="Nothing is on trial"):
        exposure_trial_keep(alice)
    assert exposure_settings().allowed_networks == []


def test_nothing_else_changes_while_a_change_is_on_trial(alice):
    exposure_change(alice, trial_s=60, allowed_networks=["192.168.0.0/16"])
    with pytest.raises(Conflict, match="on trial"):
        exposure_change(alice, port=9000)
    assert exposure_settings().port != 9000


def test_a_trial_goes_on_over_a_restart(alice, monkeypatch):
    exposure_change(alice, trial_s=60, allowed_networks=["192.168.0.0/16"])
    policy_remove()
    exposure_install(exposure_settings())
    assert not policy_current().admits(HERE)
    later(monkeypatch, 61)
    assert policy_current().admits(HERE)


def test_a_trial_that_ended_while_the_server_was_down_does_not_hold(alice, monkeypatch):
    exposure_change(alice, trial_s=60, allowed_networks=["192.168.0.0/16"])
    policy_remove()
    later(monkeypatch, 3600)
    exposure_install(exposure_settings())
    assert policy_current().admits(HERE)


def test_whoever_saves_cannot_shut_themselves_out(alice):
    exposure_change(alice, allowed_hosts=["box.example"])
    with pytest.raises(BadRequest, match=r"your address is 10\.1\.1\.1") as by_address:
        exposure_change(alice, client_address="10.1.1.1", allowed_networks=["192.168.0.0/16"])
    assert by_address.value.param == "allowed_networks"
    with pytest.raises(BadRequest, match=r"you came by box\.example") as by_name:
        exposure_change(alice, client_host="BOX.example:8000", allowed_hosts=["other.example"])
    assert by_name.value.param == "allowed_hosts"
    assert exposure_settings().allowed_hosts == ["box.example"]


def test_an_open_server_stays_guarded_when_the_next_start_is_to_be_local(alice):
    """It listens where it listens until then, so callers from everywhere must not come in."""
    row = exposure_change(alice, bind_host="0.0.0.0", allowed_hosts=["box.example"])
    exposure_install(row)
    assert not policy_current().admits(parse_address("8.8.8.8"))
    exposure_change(alice, bind_host="127.0.0.1")
    assert not policy_current().admits(parse_address("8.8.8.8"))


def test_an_installed_policy_without_a_trial_has_no_end(alice, monkeypatch):
    policy_install(policy_current())
    later(monkeypatch, 10**6)
    assert policy_current().admits(HERE)
