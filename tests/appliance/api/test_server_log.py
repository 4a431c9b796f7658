"""C06: what a whole server writes about its requests, at its most talkative."""

from pathlib import Path

import httpx
import pytest

from tests.appliance.api.checks import CHAT, GOOD
from tests.appliance.api.conftest import CODE
from tests.appliance.serving.processes import WAIT_S, Running, make_data_dir

WRONG = "bh_" + "S" * 40


def test_c06_the_log_of_a_server_holds_no_key_and_no_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    running = Running(make_data_dir(tmp_path), ["-c", CODE, "{port}"], APPLIANCE_LOG_LEVEL="DEBUG")
    try:
        key = running.line()
        running.until_ready()
        with httpx.Client(base_url=running.url, timeout=WAIT_S) as client:
            body = {**GOOD, "messages": [{"role": "user", "content": "my private words"}]}
            for secret in (key, WRONG):
                bearer = {"Authorization": f"Bearer {secret}"}
                client.post(CHAT, json=body, headers=bearer)
                client.post(CHAT, json={**body, "model": 5}, headers=bearer)
                client.post(f"{CHAT}?api_key={secret}", json=body)
                client.get("/v1/nope", headers={**bearer, "Cookie": f"sessionid={secret}"})
                # Refused before the product sees it.
                client.get(f"/login/?token={secret}", headers={**bearer, "Host": "evil.example"})
                client.post("/v1/messages", json=body, headers={"x-api-key": secret})
    finally:
        running.end()
    said = "".join(capfd.readouterr())
    assert "evil" in said or "refused" in said
    for secret in (key[7:], WRONG[7:], "my private words"):
        assert secret not in said
