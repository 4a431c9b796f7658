import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.apps import apps
from django.contrib.auth.models import Group
from django.contrib.sessions.models import Session
from django.core.cache import cache
from django.db import IntegrityError, OperationalError, connection, connections
from django.db.models import Model
from django.test import TransactionTestCase
from django.test.utils import setup_databases, teardown_databases

from appliance.accounts.models import User
from appliance.quotas.models import UsageRecord
from appliance.serving.chat_settings import DEFAULTS, chat_settings_apply
from tests.appliance.base import make_alice, make_bob, make_charlie


@pytest.fixture(scope="session")
def django_db_setup(django_test_environment: None, django_db_blocker: Any) -> Iterator[None]:
    """The test database, also when every chosen test uses `committed_db` alone.

    pytest-django makes it only for tests that have its own mark or fixtures.
    """
    with django_db_blocker.unblock():
        made = setup_databases(verbosity=0, interactive=False)
    yield
    with django_db_blocker.unblock():
        _end_other_connections()
        teardown_databases(made, verbosity=0)


def _end_other_connections() -> None:
    """Threads of the tests may still hold one, and PostgreSQL drops no database that is in use."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )


@pytest.fixture(autouse=True, scope="session")
def _emptied_whatever_still_reads() -> Iterator[None]:
    """A test ends with the tables empty, also while a thread of the server still looks into one.

    PostgreSQL locks every table to empty them and takes a reader of two of them for a deadlock.
    """
    empty = TransactionTestCase._fixture_teardown

    def empty_again(case: TransactionTestCase) -> None:
        _tried_again(lambda: empty(case))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransactionTestCase, "_fixture_teardown", empty_again)
        yield


def _tried_again(act: Callable[[], None]) -> None:
    """Once more, up to five times, where another connection was in the way."""
    for _ in range(4):
        try:
            return act()
        except (OperationalError, IntegrityError):
            time.sleep(0.2)
    return act()


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
def committed_db(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """Committed rows, so that the threads of the database work see them.

    Like `transactional_db`, but at the end only tables that hold a row are emptied: emptying every
    table takes half a second on PostgreSQL.
    """
    with django_db_blocker.unblock():
        yield
        _tried_again(_delete_every_row)
        connections.close_all()


def _delete_every_row() -> None:
    # Users first: most of the rest hangs on them and goes along.
    for model in (UsageRecord, Session, Group, User, *_own_models()):
        if model._default_manager.exists():
            model._default_manager.all().delete()


def _own_models() -> list[type[Model]]:
    """No migration writes into their tables."""
    return [model for model in apps.get_models() if model.__module__.startswith("appliance.")]


@pytest.fixture
def quick_passwords(settings: Any) -> None:
    """The real hasher takes a third of a second a password, on purpose."""
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


@pytest.fixture(autouse=True)
def _chat_settings_as_at_first() -> None:
    chat_settings_apply(DEFAULTS)


@pytest.fixture(autouse=True)
def _empty_cache() -> None:
    # Rate limits count there.
    cache.clear()
