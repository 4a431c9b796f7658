import shutil
from pathlib import Path

import pytest
from django.conf import settings as django_settings

from appliance.accounts.services import user_create
from appliance.exposure.policy import policy_remove
from appliance.serving.gateway import gateway_install, gateway_remove
from appliance.serving.types import Caller, GenerationRequest, SamplingOptions
from tests.appliance.fake_backend import FakeBackend
from tests.appliance.serving.processes import make_data_dir


@pytest.fixture(autouse=True)
def own_policy():
    """Undo what a test installs. Set up first, so undone after every override of a setting."""
    hosts_before = list(django_settings.ALLOWED_HOSTS)
    yield
    policy_remove()
    django_settings.ALLOWED_HOSTS = hosts_before


@pytest.fixture
def backend():
    backend = FakeBackend()
    gateway_install(backend)
    yield backend
    gateway_remove()


@pytest.fixture
def bob(transactional_db):
    """Committed, so that the threads of the database work see him."""
    return user_create("bob")


@pytest.fixture
def ask(bob):
    def make(text="What is the capital of France?", **options):
        return GenerationRequest(
            caller=Caller(user_id=bob.pk, username="bob", source="chat", key_prefix=None),
            messages=[{"role": "user", "content": text}],
            options=SamplingOptions(**options),
            generation_class="interactive",
        )

    return make


@pytest.fixture(scope="session")
def migrated_dir(tmp_path_factory):
    """A data folder with every table and nobody in it, made once and copied."""
    return make_data_dir(tmp_path_factory.mktemp("migrated"))


@pytest.fixture
def data_dir(migrated_dir, tmp_path):
    return Path(shutil.copytree(migrated_dir, tmp_path / "data"))
