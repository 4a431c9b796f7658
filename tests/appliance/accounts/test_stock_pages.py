"""Refusals and faults look like the product, say what to do, lead back, and tell no secrets."""

import logging

import pytest
from django.core.exceptions import PermissionDenied
from django.db import OperationalError
from django.http import Http404, HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.test import Client
from django.test.utils import override_settings
from django.urls import path

from appliance import urls
from appliance.accounts.models import User

pytestmark = pytest.mark.django_db

STATUSES = ("400", "403", "403_csrf", "404", "405", "429", "500")
SECRET = "the-inside-of-it"


def fails(request: HttpRequest, how: str) -> HttpResponse:
    faults = {"fault": ValueError, "database": OperationalError, "gone": Http404}
    raise faults.get(how, PermissionDenied)(SECRET)


fails.login_required = False  # type: ignore[attr-defined]
handler500 = urls.handler500
urlpatterns = [path("console/fails/<str:how>/", fails), *urls.urlpatterns]


def bare_client() -> Client:
    """As a browser is answered: a fault is a page, not an exception."""
    return Client(raise_request_exception=False, headers={"accept": "text/html"})


@pytest.mark.parametrize("name", STATUSES)
def test_each_stands_without_request_user_and_database(name: str) -> None:
    page = render_to_string(f"{name}.html")
    assert "Blockhouse</title>" in page
    assert page.count("<h1>") == 1
    assert 'href="/"' in page
    assert f"Error {name[:3]}" in page


@pytest.mark.parametrize(
    ("how", "status", "head"),
    [
        ("fault", 500, "Something failed here"),
        ("database", 503, "Not now"),
        ("gone", 404, "There is nothing at this address"),
        ("refused", 403, "You may not open this page"),
    ],
)
def test_a_fault_is_told_without_its_inside(
    how: str, status: int, head: str, settings, caplog: pytest.LogCaptureFixture
) -> None:
    settings.ROOT_URLCONF = __name__
    caplog.set_level(logging.CRITICAL)
    answer = bare_client().get(f"/console/fails/{how}/")
    page = answer.content.decode()
    assert answer.status_code == status
    assert head in page
    assert SECRET not in page
    assert "Traceback" not in page
    assert f"Error {status}" in page
    assert 'href="/console/"' in page or status == 403


def test_only_what_can_be_asked_again_offers_it(settings, caplog: pytest.LogCaptureFixture) -> None:
    settings.ROOT_URLCONF = __name__
    caplog.set_level(logging.CRITICAL)
    assert "Try again</a>" in bare_client().get("/console/fails/fault/").content.decode()
    # A link would ask for the form's address as a page.
    posted = bare_client().post("/console/fails/fault/").content.decode()
    assert "Try again</a>" not in posted
    assert "Go to chat</a>" in posted


@pytest.mark.parametrize("path_", ["/", "/console/", "/nothing/", "/login/"])
def test_a_database_that_fails_ends_in_a_page_everywhere(
    path_: str, settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.SESSION_ENGINE = "django.contrib.sessions.backends.db"

    def fail(*args: object, **kwargs: object) -> None:
        raise OperationalError("database or disk is full")

    client = bare_client()
    client.cookies["sessionid"] = "x" * 32
    monkeypatch.setattr("django.db.models.sql.compiler.SQLCompiler.execute_sql", fail)
    answer = client.get(path_)
    assert answer.status_code in (404, 503)
    assert "Blockhouse</title>" in answer.content.decode()
    assert "disk" not in answer.content.decode()


def test_c04_a_form_without_its_token_says_that_nothing_was_changed(bob: User) -> None:
    client = Client(enforce_csrf_checks=True)
    answer = client.post("/login/", {"login": "bob", "password": "x"})
    page = answer.content.decode()
    assert answer.status_code == 403
    assert "This form is out of date" in page
    assert "CSRF" not in page


@override_settings(DATA_UPLOAD_MAX_NUMBER_FIELDS=3)
def test_a_request_that_makes_no_sense_gets_a_page_of_ours(bob: User) -> None:
    client = Client()
    answer = client.post("/login/", {f"field{number}": "x" for number in range(5)})
    assert answer.status_code == 400
    assert "cannot read this request" in answer.content.decode()


def test_the_address_of_a_form_opened_as_a_page_leads_back(alice: User) -> None:
    client = bare_client()
    client.force_login(alice)
    answer = client.get("/console/models/load/")
    page = answer.content.decode()
    assert answer.status_code == 405
    assert answer["Allow"] == "POST"
    assert "This address is no page" in page
    assert 'href="/console/"' in page
    # Scripts get no page.
    assert client.get("/console/models/load/", headers={"accept": "*/*"}).content == b""
