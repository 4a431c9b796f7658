"""/v1/openapi.json tells every route, and each body as it is checked."""

import re
from typing import Any

from appliance.api.handler import OLLAMA_PATHS
from appliance.api.ollama_views import ollama_api
from appliance.api.urls import api
from tests.appliance.api.asgi_caller import Caller

# Answered, but only to say that there is no such thing here.
REFUSED = {"/api/embed", "/api/embeddings"}


def routes(of: Any, prefix: str) -> set[tuple[str, str]]:
    found = set()
    for pattern in of.urls[0]:
        if pattern.name != "api-root":
            route = pattern.pattern._route
            path = prefix + re.sub(r"<(?:path:)?(\w+)>", r"{\1}", route)
            view = of._routers[0][1].path_operations["/" + re.sub("<(.+?)>", r"{\1}", route)]
            for operation in view.operations:
                found |= {
                    (path, method.lower()) for method in operation.methods if method != "HEAD"
                }
    return found


async def test_the_document_has_every_route_and_no_other(caller: Caller) -> None:
    document = await (await caller.get("/v1/openapi.json")).json()
    told = {(path, method) for path, item in document["paths"].items() for method in item}
    told = {(path, method) for path, method in told if method != "parameters"}
    served = routes(api, "/v1/") | routes(ollama_api, "/api/")
    assert told == {(path, method) for path, method in served if path not in REFUSED}
    assert {path for path, _ in routes(ollama_api, "/api/")} <= OLLAMA_PATHS


async def test_every_reference_leads_somewhere_and_bodies_name_what_they_need(
    caller: Caller,
) -> None:
    document = await (await caller.get("/v1/openapi.json")).json()
    schemas = document["components"]["schemas"]

    def check(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(reference := value.get("$ref"), str):
                assert reference.removeprefix("#/components/schemas/") in schemas
            for inner in value.values():
                check(inner)
        elif isinstance(value, list):
            for inner in value:
                check(inner)

    check(document)
    assert schemas["ChatBody"]["required"] == ["model", "messages"]
    assert schemas["MessagesBody"]["properties"]["max_tokens"]["minimum"] == 1


async def test_the_document_needs_a_key(stranger: Caller) -> None:
    assert (await (await stranger.get("/v1/openapi.json")).ended()).status == 401
