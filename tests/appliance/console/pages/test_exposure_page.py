"""The exposure page: what it shows is true, refusals stand at their field, and one can go back."""

import ipaddress
from collections.abc import Iterator
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.test import Client

from appliance.accounts.models import User
from appliance.console.models import AuditRecord
from appliance.console.reach_table import reach_columns, reach_faults, reach_rows
from appliance.exposure import reach
from appliance.exposure.policy import ExposurePolicy, policy_remove
from appliance.exposure.reach import Answer, Listening
from appliance.exposure.services import exposure_change, exposure_settings, exposure_trial

pytestmark = pytest.mark.django_db

PAGE = "/console/exposure/"


@pytest.fixture(autouse=True)
def own_policy(_host_of_the_test_client: None) -> Iterator[None]:
    hosts = list(django_settings.ALLOWED_HOSTS)
    yield
    policy_remove()
    django_settings.ALLOWED_HOSTS = hosts


def callers(**changes: str) -> dict[str, str]:
    return {"allowed_hosts": "", "allowed_networks": "", "trusted_proxies": "", **changes}


def test_the_page_needs_no_inline_style_or_script(admin: Client) -> None:
    html = admin.get(PAGE).content.decode()
    assert "style=" not in html
    assert "<style" not in html
    assert 'aria-current="page">Exposure' in html


def test_a_saved_name_holds_at_once_and_is_audited(admin: Client) -> None:
    assert admin.get(PAGE, headers={"host": "box.example"}).status_code == 400
    saved = admin.post(PAGE + "save/callers/", callers(allowed_hosts="box.example"))
    assert saved.status_code == 302
    assert "box.example" in admin.get(PAGE).content.decode()
    assert exposure_trial() is None
    assert admin.get("/login/", headers={"host": "box.example"}).status_code != 400
    record = AuditRecord.objects.get()
    assert (record.action, record.actor_name) == ("exposure.change", "alice")
    assert record.detail["after"] == {"allowed_hosts": ["box.example"]}


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("allowed_hosts", "*", "a host name such as box.example"),
        ("allowed_networks", "10.0.0.1/8", "such as 10.20.0.0/16"),
        ("trusted_proxies", "the proxy", "such as 10.20.0.0/16"),
        ("allowed_networks", "192.168.0.0/16", "your address is 127.0.0.1"),
    ],
)
def test_a_refusal_stands_at_its_field(admin: Client, field: str, value: str, reason: str) -> None:
    answer = admin.post(PAGE + "save/callers/", callers(**{field: value}))
    assert answer.status_code == 400
    html = answer.content.decode()
    error = html.split(f'id="id_{field}_error"')[1].split("</span></span>")[0]
    assert reason in error
    assert field not in error
    assert value in html
    assert not AuditRecord.objects.exists()


def test_a_bad_port_and_an_open_bind_without_a_name_are_refused(admin: Client) -> None:
    for port in ("70000", "0", "many", ""):
        bad = admin.post(PAGE + "save/address/", {"bind_host": "127.0.0.1", "port": port})
        assert bad.status_code == 400
        assert "Give a whole number from 1 to 65535." in bad.content.decode()
    bad = admin.post(PAGE + "save/address/", {"bind_host": "0.0.0.0", "port": "8000"})
    assert bad.status_code == 400
    assert "no name is declared" in bad.content.decode()
    assert "Save one under Names" in bad.content.decode()
    assert exposure_settings().bind_host == "127.0.0.1"


def test_an_address_is_for_the_next_start_and_says_so(admin: Client) -> None:
    data = {"bind_host": "127.0.0.1", "port": "8123"}
    page = admin.post(PAGE + "save/address/", data, follow=True)
    assert "from the next start of the server on" in page.content.decode()
    assert exposure_settings().port == 8123


def test_saving_the_same_again_is_no_change(admin: Client) -> None:
    page = admin.post(PAGE + "save/callers/", callers(), follow=True)
    assert "Nothing was changed" in page.content.decode()
    assert not AuditRecord.objects.exists()


def test_a_risky_change_is_on_trial_and_kept_or_taken_back(admin: Client) -> None:
    for how, networks in (("take-back", []), ("keep", ["127.0.0.0/8"])):
        saved = admin.post(
            PAGE + "save/callers/", callers(allowed_networks="127.0.0.0/8"), follow=True
        )
        html = saved.content.decode()
        assert "data-countdown" in html
        assert "Networks none named → 127.0.0.0/8" in html
        ended = admin.post(PAGE + f"trial/{how}/", follow=True).content.decode()
        assert "data-countdown" not in ended
        assert exposure_settings().allowed_networks == networks


def test_one_click_goes_back_to_before_a_change(admin: Client, alice: User) -> None:
    exposure_change(alice, allowed_hosts=["box.example"])
    exposure_change(alice, allowed_hosts=["box.example", "two.example"])
    record = AuditRecord.objects.first()
    admin.post(PAGE + f"back/{record.pk}/")
    assert exposure_settings().allowed_hosts == ["box.example"]
    assert admin.post(PAGE + "back/999999/").status_code == 404


def test_an_act_of_another_kind_cannot_be_gone_back_to(admin: Client) -> None:
    other = AuditRecord.objects.create(actor_name="a", action="engine.tune", target="slots")
    assert admin.post(PAGE + f"back/{other.pk}/").status_code == 404


# ---- the table of reach


OWN = [ipaddress.ip_address("10.20.4.12"), ipaddress.ip_address("203.0.113.9")]
OFFICE = ipaddress.ip_network("10.20.0.0/16")
VPN = ipaddress.ip_network("10.99.0.0/24")
LOCAL = ipaddress.ip_network("127.0.0.0/8")


def policy(*networks: Any) -> ExposurePolicy:
    return ExposurePolicy(
        hosts=("localhost",), networks=networks or None, proxies=(), max_body_bytes=1
    )


def answering(monkeypatch: pytest.MonkeyPatch, **statuses: int | None) -> None:
    """Each address answers all parts well, unless it is named here with one status for all."""
    good = {"chat": 200, "api": 401, "console": 302, "metrics": 401}

    def ask_all(address: Any, port: int) -> dict[str, Answer]:
        status = statuses.get("a" + str(address).replace(".", "_"), "good")
        return {p: Answer(s if status == "good" else status, 0.004) for p, s in good.items()}

    monkeypatch.setattr("appliance.console.reach_table.ask_all", ask_all)


def test_allowed_and_answered_and_places_without_a_probe(monkeypatch: Any) -> None:
    answering(monkeypatch, a203_0_113_9=403)
    columns = reach_columns(policy(LOCAL, OFFICE, VPN), [Listening("0.0.0.0", 8000)], OWN)
    assert [c.title for c in columns] == [
        "This machine",
        "10.20.0.0/16",
        "10.99.0.0/24",
        "Anywhere else",
    ]
    name, _, cells = reach_rows(columns)[1]
    assert name == "API"
    assert [(c.allowed, c.verdict) for c in cells] == [
        ("Allowed, API key", "answered in 4 ms"),
        ("Allowed, API key", "answered in 4 ms"),
        ("Allowed, API key", "not tested: this machine has no address there"),
        ("Blocked", "refused, as it should be"),
    ]
    assert reach_faults(columns) == []


def test_what_answers_although_it_is_blocked_is_told(monkeypatch: Any) -> None:
    answering(monkeypatch)
    columns = reach_columns(policy(LOCAL, OFFICE), [Listening("0.0.0.0", 8000)], OWN)
    assert "Metrics from anywhere else is blocked, but it answered." in reach_faults(columns)


def test_what_is_allowed_but_does_not_answer_is_told(monkeypatch: Any) -> None:
    answering(monkeypatch, a127_0_0_1=None)
    columns = reach_columns(policy(), [Listening("127.0.0.1", 8000)], OWN)
    assert "Chat from this machine is allowed, but no answer came." in reach_faults(columns)


def test_a_server_for_this_machine_only_is_reached_from_nowhere_else(monkeypatch: Any) -> None:
    answering(monkeypatch)
    columns = reach_columns(policy(), [Listening("127.0.0.1", 8000)], OWN)
    elsewhere = reach_rows(columns)[0][2][-1]
    assert elsewhere.is_blocked
    assert "it listens to this machine only" in elsewhere.verdict


def test_the_words_of_a_refused_network_are_those_that_the_test_looks_for() -> None:
    from appliance.errors import NotAllowed
    from appliance.exposure.admission import admit
    from appliance.exposure.middleware import error_json

    scope = {"type": "http", "path": "/login/", "client": ["8.8.8.8", 1], "headers": []}
    with pytest.raises(NotAllowed) as refused:
        admit(scope, policy(LOCAL))
    assert not reach.is_let_in("chat", Answer(403, 0, error_json(refused.value)))
    assert b"network address may not use" in error_json(refused.value)
