"""/v1/detokenize and /v1/embeddings."""

from typing import Any

import pytest

from appliance.quotas.models import UsageRecord
from appliance.serving.booking import in_db_thread
from tests.appliance.api.asgi_caller import Caller
from tests.appliance.api.checks import check_error


async def test_tokens_become_text_and_cost_nothing(caller: Caller) -> None:
    answer = await caller.post("/v1/detokenize", {"tokens": [4, 2], "model": "scripted"})
    assert await answer.json() == {"prompt": "w4 w2"}
    assert await in_db_thread(UsageRecord.objects.count) == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "tokens"),
        ({"tokens": "4"}, "tokens"),
        ({"tokens": [4, "2"]}, "tokens[1]"),
        ({"tokens": [True]}, "tokens[0]"),
        ({"tokens": [-1]}, "tokens"),
        ({"tokens": [10**18]}, "tokens"),
    ],
)
async def test_what_is_no_token_is_400(caller: Caller, body: Any, param: str) -> None:
    answer = await caller.post("/v1/detokenize", body)
    body = await answer.json()
    assert (answer.status, body["error"]["code"]) == (400, "invalid_request")
    assert (body["error"]["param"] or "").startswith(param.partition("[")[0])


@pytest.mark.parametrize("encoding", ["base64", "float", None])
async def test_b18_a_model_without_embeddings_says_so(caller: Caller, encoding: str | None) -> None:
    body = {"model": "scripted", "input": ["a", "b"], "encoding_format": encoding}
    answer = await caller.post("/v1/embeddings", body)
    error = await check_error(answer, 400, "invalid_request", param="model")
    assert "embeddings" in error["message"]
    other = await caller.post("/v1/embeddings", {**body, "model": "other"})
    await check_error(other, 404, "model_not_found", param="model")
