"""Refusals of Django itself look like the product and say what to do."""

import pytest
from django.test import Client
from django.test.utils import override_settings

from appliance.accounts.models import User

pytestmark = pytest.mark.django_db


def test_c04_a_form_without_its_token_says_that_nothing_was_changed(bob: User) -> None:
    client = Client(enforce_csrf_checks=True)
    answer = client.post("/login/", {"login": "bob", "password": "x"})
    page = answer.content.decode()
    assert answer.status_code == 403
    assert "This form is out of date" in page
    assert "Blockhouse · testserver" in page
    assert "CSRF" not in page


@override_settings(DATA_UPLOAD_MAX_NUMBER_FIELDS=3)
def test_a_request_that_makes_no_sense_gets_a_page_of_ours(bob: User) -> None:
    client = Client()
    answer = client.post("/login/", {f"field{number}": "x" for number in range(5)})
    assert answer.status_code == 400
    assert "cannot read this request" in answer.content.decode()
