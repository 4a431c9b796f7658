"""`manage.py models`: see, import and choose models from the command line."""

import io
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
from django.core.management import CommandError, call_command

from appliance.env import EnvError, env_url
from tests.appliance.serving.tiny_model import save_tiny_model
from tests.inference.gguf_files import llama_weights, write_llama
from tests.inference.hub_server import HubServer


@pytest.fixture(autouse=True)
def models_dir(settings, tmp_path: Path) -> Path:
    settings.MODELS_DIR = tmp_path / "models"
    settings.APPLIANCE_MODEL = ""
    return settings.MODELS_DIR


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "Tiny.gguf"
    write_llama(path, llama_weights(), gguf.GGMLQuantizationType.Q8_0)
    return path


def models(*arguments: str) -> str:
    out = io.StringIO()
    call_command("models", *arguments, stdout=out, stderr=io.StringIO())
    return out.getvalue()


def test_an_empty_store_lists_what_can_be_fetched() -> None:
    assert models("list") == (
        "  smollm2-135m-instruct  not here; needs 570 MB while it is fetched: "
        "models pull smollm2-135m-instruct\n"
    )


def test_an_imported_model_is_listed_and_can_be_chosen(gguf_path: Path, models_dir: Path) -> None:
    assert models("import", str(gguf_path)) == f"tiny is ready in {models_dir / 'tiny'}\n"
    assert models("use", "tiny") == "tiny is served from the next start on.\n"
    line = next(line for line in models("list").splitlines() if "tiny" in line)
    assert line.startswith("* tiny ")
    assert line.endswith("512 tokens of context, LlamaForCausalLM")


def test_ensure_has_the_model_that_the_next_start_serves(
    gguf_path: Path, models_dir: Path, settings
) -> None:
    settings.APPLIANCE_MODEL = str(gguf_path)
    assert models("ensure") == models("ensure") == f"tiny is ready in {models_dir / 'tiny'}\n"
    settings.APPLIANCE_MODEL = ""
    models("use", "tiny")
    assert models("ensure") == f"tiny is ready in {models_dir / 'tiny'}\n"


def test_a_setting_that_goes_first_is_named(gguf_path: Path, settings) -> None:
    models("import", str(gguf_path), "--name", "other")
    settings.APPLIANCE_MODEL = "elsewhere"
    assert "APPLIANCE_MODEL is set to elsewhere and goes first" in models("use", "other")


def test_progress_is_told_apart_from_the_answer(gguf_path: Path) -> None:
    progress = io.StringIO()
    call_command("models", "import", str(gguf_path), stdout=io.StringIO(), stderr=progress)
    lines = progress.getvalue().splitlines()
    assert lines[0] == "  0% reading the file"
    assert lines[-1] == "100% done"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("pull", "nonesuch"), "it has smollm2-135m-instruct"),
        (("use", "../../etc"), "There is no model"),
        (("import", "/nonesuch.gguf"), "neither a .gguf file nor a folder"),
        (("import", __file__, "--name", "../x"), "no model name"),
    ],
)
def test_c20_a_refusal_is_one_line_and_changes_nothing(
    arguments: tuple[str, ...], says: str, models_dir: Path
) -> None:
    with pytest.raises(CommandError) as caught:
        models(*arguments)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not [path for path in models_dir.glob("*") if path.name != ".lock"]


# ---- a hub


@pytest.fixture
def hub(settings) -> Iterator[HubServer]:
    server = HubServer()
    settings.APPLIANCE_HUB_URL = server.url
    settings.APPLIANCE_DEVICE = "cpu"
    yield server
    server.close()


def test_a_model_of_the_hub_is_fetched_by_its_repository(
    hub: HubServer, tmp_path: Path, models_dir: Path, settings
) -> None:
    source = save_tiny_model(tmp_path / "source")
    hub.repos["org/Tiny"] = {path.name: path.read_bytes() for path in source.iterdir()}
    hub.private.add("org/Tiny")
    token_file = tmp_path / "token"
    token_file.write_text(hub.token + "\n")
    settings.APPLIANCE_HUB_TOKEN_FILE = str(token_file)
    token_file.chmod(0o640)
    with pytest.raises(CommandError, match="chmod 600"):
        models("pull", "org/Tiny")
    assert hub.asked == []
    token_file.chmod(0o600)
    said = io.StringIO()
    call_command("models", "pull", "org/Tiny", stdout=io.StringIO(), stderr=said)
    assert (models_dir / "tiny" / "model.safetensors").is_file()
    notes = [line for line in said.getvalue().splitlines() if line.startswith("note: ")]
    assert len(notes) == 1
    assert "It fits this machine's memory" in notes[0]
    assert hub.token not in said.getvalue()


@pytest.mark.parametrize("kind", ["absent", "folder", "binary"])
def test_a_token_that_cannot_be_read_is_told_with_its_path(
    hub: HubServer, tmp_path: Path, settings, kind: str
) -> None:
    path = tmp_path / "token"
    if kind == "folder":
        path.mkdir(mode=0o700)
    elif kind == "binary":
        path.write_bytes(b"\xff\xfe")
        path.chmod(0o600)
    settings.APPLIANCE_HUB_TOKEN_FILE = str(path)
    with pytest.raises(CommandError, match="APPLIANCE_HUB_TOKEN_FILE"):
        models("pull", "org/Tiny")
    assert hub.asked == []


@pytest.mark.parametrize(
    "value", ["huggingface.co", "ftp://x", "https://user:secret@x", "https://x/?a=b", "http://["]
)
def test_an_address_of_the_hub_that_is_none_stops_the_start_without_its_secret(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPLIANCE_HUB_URL", value)
    with pytest.raises(EnvError, match="APPLIANCE_HUB_URL is no web address") as caught:
        env_url("APPLIANCE_HUB_URL", "https://huggingface.co")
    assert "secret" not in str(caught.value)
