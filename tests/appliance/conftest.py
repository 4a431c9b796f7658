from typing import Any

import pytest
from django.core.cache import cache

from appliance.accounts.models import User
from tests.appliance.base import make_alice, make_bob, make_charlie


@pytest.fixture
def alice(db: None) -> User:
    return make_alice()


@pytest.fixture
def bob(db: None) -> User:
    return make_bob()


@pytest.fixture
def charlie(db: None) -> User:
    return make_charlie()


@pytest.fixture
def quick_passwords(settings: Any) -> None:
    """The real hasher takes a third of a second a password, on purpose."""
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


@pytest.fixture(autouse=True)
def _empty_cache() -> None:
    # Rate limits count there.
    cache.clear()
