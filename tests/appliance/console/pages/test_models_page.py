"""The models page, and `PATCH /api/engine {"model": …}`: a running server changes its model."""

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from appliance.accounts.models import User
from appliance.api_keys.services import api_key_issue
from appliance.console.audit import audit_words
from appliance.console.model_notices import DONE_SHOWN_S
from appliance.console.models import AuditRecord
from appliance.serving.engine_backend import EngineBackend
from appliance.serving.gateway import gateway_install, gateway_remove
from appliance.serving.model_jobs import ModelJob, ModelJobs
from inference.errors import NotEnoughMemory
from inference.model_store import ModelStore
from tests.appliance.base import make_bob
from tests.appliance.serving.tiny_model import save_tiny_model
from tests.inference.faults import Faults
from tests.inference.helpers import make_request

pytestmark = pytest.mark.django_db(transaction=True)

PAGE = "/console/models/"
DEADLINE_S = 60.0


@pytest.fixture
def store(settings: Any, tmp_path: Path) -> ModelStore:
    settings.MODELS_DIR = tmp_path / "models"
    settings.APPLIANCE_MODEL = ""
    settings.APPLIANCE_DRAIN_SECONDS = 30.0
    save_tiny_model(settings.MODELS_DIR / "former")
    shutil.copytree(settings.MODELS_DIR / "former", settings.MODELS_DIR / "newer")
    return ModelStore(settings.MODELS_DIR)


@pytest.fixture
def faults() -> Faults:
    return Faults(max_model_len=200)


@pytest.fixture
def backend(store: ModelStore, faults: Faults) -> Iterator[EngineBackend]:
    backend = EngineBackend(
        lambda report: store.path_of("former"),
        faults.make_runner,
        config={},
        backoff_s=0.0,
        look_every_s=0.02,
    )
    gateway_install(backend)
    backend.start()
    until(lambda: backend.model is not None)
    yield backend
    faults.go_on.set()
    gateway_remove()
    backend._supervisor.stop(0.0)


@pytest.fixture(autouse=True)
def jobs(monkeypatch: pytest.MonkeyPatch) -> ModelJobs:
    jobs = ModelJobs()
    monkeypatch.setattr("appliance.console.model_acts.model_jobs", jobs)
    monkeypatch.setattr("appliance.console.views_models.model_jobs", jobs)
    return jobs


def until(claim: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not claim():
        assert time.monotonic() < deadline, "it never came true"
        pause.wait(0.01)


def shown(admin: Client) -> str:
    return admin.get(PAGE).content.decode()


def swapped(backend: EngineBackend) -> bool:
    swap = backend.state()["swap"]
    return swap is not None and swap["stage"] in ("done", "failed")


def acts() -> list[str]:
    return [audit_words(record) for record in AuditRecord.objects.order_by("pk")]


# ---- loading another


def test_the_page_shows_what_is_here_which_is_loaded_and_whether_it_would_fit(
    admin: Client, backend: EngineBackend
) -> None:
    html = shown(admin)
    for part in ("former", "newer", "Llama", "512", "float32", "smollm2-135m-instruct"):
        assert part in html
    assert len(re.findall(r">\s*loaded</span>", html)) == 1
    assert "Answers at the same time: about" in html
    assert "at 512 tokens" in html
    assert "No answer is being written." in html


def test_a_model_is_loaded_from_the_page_and_everything_follows(
    admin: Client, alice: User, backend: EngineBackend, store: ModelStore
) -> None:
    answer = admin.post(f"{PAGE}load/", {"name": "newer"})
    assert (answer.status_code, answer.url) == (302, PAGE)
    until(lambda: swapped(backend))
    assert backend.state()["swap"]["stage"] == "done"
    until(lambda: store.selected() == "newer")
    key = {"authorization": f"Bearer {api_key_issue(alice, 'ops', ['models'])[1]}"}
    listed = Client(headers={"host": "localhost", **key}).get("/v1/models").json()
    assert [entry["id"] for entry in listed["data"]] == ["newer"]
    assert acts() == ["Began to load the model newer"]


def test_the_confirmation_says_how_many_answers_are_running(
    admin: Client, backend: EngineBackend, faults: Faults
) -> None:
    pause = threading.Event()
    faults.runners[0].before_step = lambda output: pause.wait(0.005)
    stream = backend._supervisor.engine.add_request(make_request(8, 190))
    until(lambda: backend.state()["running"] == 1)
    assert "1 answer is being written and may take up to 30 seconds more" in shown(admin)
    stream.close()


def test_a_model_that_cannot_be_loaded_leaves_the_former_and_says_why(
    admin: Client, backend: EngineBackend, faults: Faults, store: ModelStore
) -> None:
    faults.load_errors["newer"] = NotEnoughMemory("The weights need 10 GB; 2 GB are free.")
    admin.post(f"{PAGE}load/", {"name": "newer"})
    until(lambda: swapped(backend))
    html = shown(admin)
    assert "newer was not loaded." in html
    assert "10 GB" in html
    assert "former is served as before" in html
    assert store.selected() is None
    assert backend.model is not None
    assert backend.model.name == "former"


@pytest.mark.parametrize("name", ["../former", "nonesuch", "", "a" * 500, "former/../newer"])
def test_c20_a_name_that_is_no_model_is_refused_and_changes_nothing(
    admin: Client, backend: EngineBackend, name: str
) -> None:
    answer = admin.post(f"{PAGE}load/", {"name": name})
    assert answer.status_code == 404
    assert "There is no model" in answer.content.decode()
    assert backend.state()["swap"] is None
    assert acts() == []


def test_c18_a_folder_that_cannot_be_served_is_refused_at_once(
    admin: Client, backend: EngineBackend, store: ModelStore
) -> None:
    config = store.path_of("newer") / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "StrangeForCausalLM"))
    answer = admin.post(f"{PAGE}load/", {"name": "newer"})
    assert answer.status_code == 400
    assert "StrangeForCausalLM" in answer.content.decode()
    assert backend.state()["swap"] is None


def test_while_one_is_changed_the_page_follows_and_a_second_is_refused(
    admin: Client, backend: EngineBackend, faults: Faults
) -> None:
    pause = threading.Event()
    faults.runners[0].before_step = lambda output: pause.wait(0.02)
    stream = backend._supervisor.engine.add_request(make_request(8, 190))
    until(lambda: backend.state()["running"] == 1)
    admin.post(f"{PAGE}load/", {"name": "newer"})
    until(lambda: backend.state()["state"] == "swapping")
    [item] = admin.get(f"{PAGE}progress/").json()["under_way"]
    assert item["what"].startswith("Changing to newer: running answers may finish")
    html = shown(admin)
    assert "js/models-page" in html
    assert 'data-dialog="load-' not in html
    second = admin.post(f"{PAGE}load/", {"name": "former"})
    assert second.status_code == 409
    assert "changing to newer already" in second.content.decode()
    stream.close()
    until(lambda: swapped(backend))
    assert admin.get(f"{PAGE}progress/").json() == {"under_way": []}


# ---- the API


def patch(client: Client, body: object) -> Any:
    return client.patch("/api/engine", body, content_type="application/json")


@pytest.fixture
def script(alice: User) -> Client:
    secret = api_key_issue(alice, "ops", ["admin"])[1]
    return Client(headers={"host": "localhost", "authorization": f"Bearer {secret}"})


def test_a_script_changes_the_model_and_reads_how_it_goes(
    script: Client, backend: EngineBackend
) -> None:
    answer = patch(script, {"model": "newer"})
    assert answer.status_code == 202
    assert answer.json()["swap"]["model"] == "newer"
    until(lambda: swapped(backend))
    assert script.get("/api/engine").json()["model"]["name"] == "newer"
    assert acts() == ["Began to load the model newer"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"model": "nonesuch"}, 404, "not_found"),
        ({"model": 7}, 400, "invalid_request"),
        ({"model": None}, 400, "invalid_request"),
        ({"model": "newer", "slots": 3}, 400, "invalid_request"),
    ],
)
def test_a_bad_change_of_the_model_is_told_by_its_field(
    script: Client, backend: EngineBackend, body: object, status: int, code: str
) -> None:
    answer = patch(script, body)
    assert answer.status_code == status
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == (code, "model")
    assert backend.state()["swap"] is None


def test_a_member_cannot_change_the_model(backend: EngineBackend) -> None:
    bob = make_bob()
    client = Client(headers={"host": "localhost"})
    client.force_login(bob)
    assert patch(client, {"model": "newer"}).status_code == 403
    assert client.post(f"{PAGE}load/", {"name": "newer"}).status_code == 403
    assert backend.state()["swap"] is None


# ---- the store


def test_a_model_that_is_not_loaded_can_be_deleted_and_the_loaded_one_not(
    admin: Client, backend: EngineBackend, store: ModelStore
) -> None:
    assert admin.post(f"{PAGE}delete/", {"name": "former"}).status_code == 409
    assert admin.post(f"{PAGE}delete/", {"name": "../newer"}).status_code == 404
    assert admin.post(f"{PAGE}delete/", {"name": "newer"}).status_code == 302
    assert [model.name for model in store.list()] == ["former"]
    assert acts() == ["Deleted the model newer"]


def test_a_folder_of_this_machine_is_imported_beside_the_server(
    admin: Client,
    backend: EngineBackend,
    tmp_path: Path,
    jobs: ModelJobs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data_dir = tmp_path / "data"
    monkeypatch.setenv("APPLIANCE_DATA_DIR", str(data_dir))
    source = save_tiny_model(tmp_path / "brought")
    assert admin.post(f"{PAGE}import/", {"path": str(source)}).status_code == 302
    busy = admin.post(f"{PAGE}get/", {"name": "another"})
    assert busy.status_code == 409
    until(lambda: not jobs.job.is_running)
    assert (jobs.job.state, jobs.job.share) == ("done", 1.0), jobs.job.said
    assert ModelStore(data_dir / "models").path_of("brought").is_dir()
    assert "brought is ready" in shown(admin)
    assert acts() == [f"Began to import the model {source}"]


def test_what_cannot_be_had_says_why_in_one_sentence(
    admin: Client,
    backend: EngineBackend,
    tmp_path: Path,
    jobs: ModelJobs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("APPLIANCE_DATA_DIR", str(tmp_path / "data"))
    admin.post(f"{PAGE}import/", {"path": str(tmp_path / "nothing<b>.gguf")})
    until(lambda: not jobs.job.is_running)
    assert jobs.job.state == "failed"
    assert "neither a .gguf file nor a folder" in jobs.job.said
    html = shown(admin)
    assert "nothing&lt;b&gt;.gguf" in html
    assert "nothing<b>" not in html


def failed_job(jobs: ModelJobs) -> None:
    jobs.job = ModelJob(
        "pull", "nonesuch", 1.0, "failed", said="No such name.", ended_at=time.time()
    )


def test_a_failure_stays_until_it_is_hidden(
    admin: Client, backend: EngineBackend, jobs: ModelJobs
) -> None:
    failed_job(jobs)
    assert "Fetching nonesuch: failed." in shown(admin)
    assert admin.post(f"{PAGE}forget/", {"what": "job"}).status_code == 302
    assert "nonesuch" not in shown(admin)


def test_a_failure_is_gone_after_a_later_success(
    admin: Client, backend: EngineBackend, jobs: ModelJobs
) -> None:
    failed_job(jobs)
    admin.post(f"{PAGE}load/", {"name": "newer"})
    until(lambda: swapped(backend))
    assert "nonesuch" not in shown(admin)


def test_a_success_is_news_for_a_while(
    admin: Client, backend: EngineBackend, jobs: ModelJobs
) -> None:
    jobs.job = ModelJob("pull", "brought", 1.0, "done", said="It is here.", ended_at=time.time())
    assert "It is here." in shown(admin)
    jobs.job = replace(jobs.job, ended_at=time.time() - DONE_SHOWN_S - 1)
    assert "It is here." not in shown(admin)


def test_a_change_of_the_model_that_failed_can_be_hidden_and_the_next_is_told_again(
    admin: Client, backend: EngineBackend, faults: Faults
) -> None:
    for _ in range(2):
        faults.load_errors["newer"] = NotEnoughMemory("The model needs more memory.")
        admin.post(f"{PAGE}load/", {"name": "newer"})
        until(lambda: swapped(backend))
        assert "newer was not loaded." in shown(admin)
        admin.post(f"{PAGE}forget/", {"what": "swap"})
        assert "newer was not loaded." not in shown(admin)


@pytest.mark.parametrize("path", ["", "relative/x.gguf", "--name", "/a\x00b", "/" + "x" * 5000])
def test_a_path_that_cannot_be_one_is_refused(
    admin: Client, backend: EngineBackend, path: str, jobs: ModelJobs
) -> None:
    assert admin.post(f"{PAGE}import/", {"path": path}).status_code == 400
    assert jobs.job is None
    assert acts() == []


def test_the_page_works_while_nothing_is_served(admin: Client, store: ModelStore) -> None:
    gateway_remove()
    html = shown(admin)
    assert "No model serves now" in html
    assert admin.post(f"{PAGE}load/", {"name": "newer"}).status_code == 503
