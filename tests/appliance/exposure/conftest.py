import pytest
from django.conf import settings as django_settings

from appliance.exposure.policy import policy_remove


@pytest.fixture(autouse=True)
def own_policy():
    """Undo what a test installs. Set up first, so undone after every override of a setting."""
    hosts_before = list(django_settings.ALLOWED_HOSTS)
    yield
    policy_remove()
    django_settings.ALLOWED_HOSTS = hosts_before
