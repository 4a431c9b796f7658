"""Pages that the server makes alone: one transaction a test is enough, and quicker."""

import pytest

from appliance.accounts.models import User
from tests.appliance.base import make_alice, make_bob


@pytest.fixture
def alice(db: None) -> User:
    return make_alice()


@pytest.fixture
def bob(db: None) -> User:
    return make_bob()
