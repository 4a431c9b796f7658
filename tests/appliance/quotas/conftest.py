import pytest

from appliance.quotas.services import Usage


@pytest.fixture
def make_usage():
    def make(prompt=10, completion=5, **changes):
        fields = {
            "request_id": "r-1",
            "username": "bob",
            "source": "api",
            "model": "scripted",
            "prompt_tokens": prompt,
            "cached_tokens": 0,
            "completion_tokens": completion,
            "queue_s": 0.0,
            "ttft_s": 0.1,
            "duration_s": 1.0,
            "end": "stop",
        }
        return Usage(**{**fields, **changes})

    return make
