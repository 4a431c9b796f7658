"""Models of a hub: pinned to a commit, checked, gone on with, and whole or absent in the store."""

import json

import gguf
import pytest

from inference.errors import ModelLoadError
from inference.fit import Machine
from inference.hub import Hub, HubError, parse_reference
from inference.hub_pull import pull_from_hub
from inference.model_store import ModelStore, ModelStoreError
from tests.appliance.serving.tiny_model import save_tiny_model
from tests.inference.gguf_files import llama_weights, write_llama
from tests.inference.hub_server import COMMIT, HubServer

ROOMY = Machine(name="this machine's memory", free_bytes=8 * 10**9, kv_share=0.25)


@pytest.fixture(autouse=True)
def no_waiting_between_retries(monkeypatch):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)


@pytest.fixture(scope="module")
def tiny_files(tmp_path_factory):
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_llama(path, llama_weights(), gguf.GGMLQuantizationType.Q8_0)
    return path.read_bytes()


@pytest.fixture
def server(tiny_files):
    server = HubServer()
    server.repos["org/Tiny-Llama"] = dict(tiny_files)
    yield server
    server.close()


@pytest.fixture
def store(tmp_path):
    return ModelStore(tmp_path / "models")


@pytest.fixture
def pull(server, store):
    notes, progress = [], []

    def pull(name, machine=ROOMY, token=None):
        return pull_from_hub(
            store,
            Hub(server.url, token),
            parse_reference(name),
            machine,
            on_progress=lambda share, what: progress.append((share, what)),
            on_note=notes.append,
        )

    pull.notes, pull.progress = notes, progress
    return pull


def left(store):
    return sorted(path.name for path in store.root.iterdir() if path.is_dir())


# ---- whole


def test_a_repository_becomes_a_model_of_the_store_pinned_to_its_commit(pull, store, server):
    folder = pull("org/Tiny-Llama@v1")
    assert folder == store.root / "tiny-llama"
    assert [model.name for model in store.list()] == ["tiny-llama"]
    origin = json.loads((folder / "origin.json").read_text())
    assert (origin["repo"], origin["commit"]) == ("org/Tiny-Llama", COMMIT)
    assert all(f"/resolve/{COMMIT}/" in path for _, path, _ in server.asked if "resolve" in path)
    assert left(store) == ["tiny-llama"], "nothing else is left behind"
    shares = [share for share, _ in pull.progress]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert any("fetching model.safetensors" in what for _, what in pull.progress)


def test_the_same_commit_is_not_fetched_twice(pull, server):
    pull("org/Tiny-Llama")
    server.asked.clear()
    pull("org/Tiny-Llama")
    assert [path for _, path, _ in server.asked if "resolve" in path] == []


def test_a_gguf_file_of_a_repository_is_imported(pull, store, server, tiny_gguf):
    server.repos["org/many"] = {"a-Q8_0.gguf": tiny_gguf, "sub/b-Q4_0.gguf": tiny_gguf}
    with pytest.raises(HubError, match=r"several GGUF files.*a-Q8_0\.gguf, sub/b-Q4_0\.gguf"):
        pull("org/many")
    assert pull("org/many:a-Q8_0.gguf").name == "a-q8_0"
    assert pull("org/many:sub/b-Q4_0.gguf").name == "b-q4_0"
    with pytest.raises(HubError, match=r"no file c\.gguf"):
        pull("org/many:c.gguf")
    assert [model.name for model in store.list()] == ["a-q8_0", "b-q4_0"]


# ---- told beforehand


def test_before_the_download_it_says_whether_the_model_fits_and_with_how_many_slots(pull):
    pull("org/Tiny-Llama")
    [note] = pull.notes
    assert COMMIT[:12] in note
    assert "It fits this machine's memory" in note
    assert "at 512 tokens" in note


def test_what_does_not_fit_is_told_before_anything_large_is_fetched(pull, server):
    server.breaks["model.safetensors"] = 0
    tight = Machine(name="this machine's memory", free_bytes=1000, kv_share=0.25)
    with pytest.raises(HubError):
        pull("org/Tiny-Llama", tight)
    assert "It does not fit this machine's memory" in pull.notes[0]


def test_a_disk_that_is_too_small_is_told_before_the_download_d12(pull, store, server, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(ModelStoreError, match="MB free; this model needs"):
        pull("org/Tiny-Llama")
    assert server.fetched().count("model.safetensors") == 0
    assert store.list() == []


# ---- broken off


def test_a_download_that_broke_off_goes_on_where_it_was_d06(
    pull, store, server, tiny_files, monkeypatch
):
    # Ten million bytes usually; the tiny model is smaller than that.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100)
    server.breaks["model.safetensors"] = 1000
    with pytest.raises(HubError, match="what was fetched is kept"):
        pull("org/Tiny-Llama")
    assert store.list() == [], "nothing half-fetched is a model"
    server.breaks.clear()
    server.asked.clear()
    pull("org/Tiny-Llama")
    ranges = [r for m, p, r in server.asked if m == "GET" and p.endswith("model.safetensors")]
    assert len(ranges) == 1
    assert ranges[0] is not None
    assert int(ranges[0].removeprefix("bytes=").removesuffix("-")) >= 1000
    got = (store.root / "tiny-llama" / "model.safetensors").read_bytes()
    assert got == tiny_files["model.safetensors"]
    assert server.fetched().count("config.json") == 0, "whole files are not asked for again"


def test_bytes_that_are_not_those_of_the_commit_are_refused(pull, store, server, tiny_files):
    right = tiny_files["model.safetensors"]
    server.sends["model.safetensors"] = right[:-1] + bytes([right[-1] ^ 1])
    with pytest.raises(HubError, match="its digest differs"):
        pull("org/Tiny-Llama")
    assert store.list() == []
    server.sends.clear()
    pull("org/Tiny-Llama")
    assert len(store.list()) == 1


def test_a_hub_that_does_not_answer_is_named(store, server):
    server.close()
    with pytest.raises(HubError, match=r"127\.0\.0\.1"):
        Hub(server.url).look(parse_reference("org/Tiny-Llama"))


# ---- refused


def changed(config, **fields):
    return json.dumps({**json.loads(config), **fields}).encode()


def with_config(**fields):
    return lambda files: {**files, "config.json": changed(files["config.json"], **fields)}


REFUSED = {
    "architecture": (with_config(architectures=["OddForCausalLM"]), "OddForCausalLM"),
    "quantised": (with_config(quantization_config={"quant_method": "awq"}), "quantised"),
    "no-json": (lambda files: {**files, "config.json": b"{"}, "cannot be read"),
    "absurd": (with_config(hidden_size=10**9), "hidden_size"),
    "no-tokenizer": (
        lambda files: {name: files[name] for name in files if name != "tokenizer.json"},
        "no tokenizer.json",
    ),
    "pickle": (
        lambda files: {"config.json": files["config.json"], "pytorch_model.bin": b"pickle"},
        "pickled",
    ),
    "empty": (lambda files: {"README.md": b"hello"}, "neither safetensors nor GGUF"),
}


@pytest.mark.parametrize(("change", "says"), REFUSED.values(), ids=REFUSED)
def test_c18_what_cannot_be_served_is_refused_before_its_weights_are_fetched(
    pull, store, server, tiny_files, change, says
):
    server.repos["org/Tiny-Llama"] = change(tiny_files)
    with pytest.raises(ModelLoadError, match=says):
        pull("org/Tiny-Llama")
    assert not {"model.safetensors", "pytorch_model.bin"} & set(server.fetched())
    assert store.list() == []


def test_c18_broken_weights_leave_nothing_behind(pull, store, server, tiny_files):
    server.repos["org/Tiny-Llama"] = {**tiny_files, "model.safetensors": b"\xff" * 5000}
    with pytest.raises(ModelLoadError, match="broken"):
        pull("org/Tiny-Llama")
    assert left(store) == []


def test_c18_code_and_pickles_are_never_asked_for(pull, server, tiny_files):
    config = changed(tiny_files["config.json"], auto_map={"AutoModel": "modeling_x.Model"})
    server.repos["org/Tiny-Llama"] = {
        **tiny_files,
        "config.json": config,
        "modeling_x.py": b"import os",
        "pytorch_model.bin": b"pickle",
        "training_args.pt": b"pickle",
        "adapter_model.safetensors": b"other",
        "onnx/model.onnx": b"other",
    }
    folder = pull("org/Tiny-Llama")
    asked = set(server.fetched())
    unwanted = {"modeling_x.py", "pytorch_model.bin", "training_args.pt", "model.onnx"}
    assert not asked & (unwanted | {"adapter_model.safetensors"})
    assert sorted(path.suffix for path in folder.iterdir() if path.suffix == ".py") == []


@pytest.mark.parametrize(
    "name",
    ["../x/y", "org", "org/../x", "/etc/passwd", "org/x:../../y.gguf", "org/x@../y", "org/x:y.bin",
     "org/x y", "org/x\n", "http://127.0.0.1/x", "org/" + "x" * 200, "-o/x", "org/x:/y.gguf"],
)  # fmt: skip
def test_c19_c20_what_is_no_name_of_a_repository_is_none(name):
    assert parse_reference(name) is None


@pytest.mark.parametrize(
    ("name", "says"),
    [("org/none", "no such model"), ("org/Tiny-Llama@v9", "no such model or revision")],
)
def test_what_is_not_there_is_told(pull, name, says):
    with pytest.raises(HubError, match=says):
        pull(name)


def test_a_private_model_needs_the_token_and_a_gated_one_its_terms(pull, server, tiny_files):
    server.private.add("org/Tiny-Llama")
    with pytest.raises(HubError, match="APPLIANCE_HUB_TOKEN_FILE"):
        pull("org/Tiny-Llama")
    server.repos["org/gated"] = dict(tiny_files)
    server.gated.add("org/gated")
    with pytest.raises(HubError, match="terms"):
        pull("org/gated")
    assert server.tokens_seen == {None}, "no token of the machine's user is sent"
    assert pull("org/Tiny-Llama", token=server.token).name == "tiny-llama"


def test_another_fetch_of_the_same_model_is_refused_and_choosing_one_does_not_wait(
    pull, store, server
):
    pull("org/Tiny-Llama")
    seen = []

    def during(share, what):
        if what.startswith("fetching") and not seen:
            seen.append(what)
            store.use("tiny-llama")
            with pytest.raises(ModelStoreError, match="being fetched already"):
                pull_again()

    def pull_again(on_progress=lambda share, what: None):
        return pull_from_hub(
            store, Hub(server.url), parse_reference("org/Tiny-Llama"), ROOMY,
            on_progress=on_progress, on_note=lambda note: None,
        )  # fmt: skip

    (store.root / "tiny-llama" / "origin.json").unlink()
    pull_again(during)
    assert seen
    assert store.selected() == "tiny-llama"
