"""The API against its own OpenAPI document: no fault of ours, and only answers that stand in it."""

from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from appliance.api.openapi import document

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
schema = schemathesis.openapi.from_dict(document())
# Every boundary of every field, one after the other: thousands of calls an address.
schema.config.phases.coverage.enabled = False


# The same few calls in every run: this is a net, and what it caught has a test of its own.
@schema.parametrize()
@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_whatever_is_sent_the_answer_stands_in_the_document(
    case: schemathesis.Case, server: Any
) -> None:
    """B05: no 500 and no page, whatever the body."""
    if isinstance(case.body, dict) and "model" in case.body:
        case.body["model"] = "scripted"
    case.call_and_validate(
        base_url=server.url, headers={"Authorization": f"Bearer {server.key}"}, checks=CHECKS
    )
