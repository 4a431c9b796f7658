"""GGUF files become model folders that other readers of checkpoints agree on."""

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch_file
from tokenizers import Tokenizer

from inference.config import ModelConfig
from inference.errors import ModelLoadError, UnsupportedArchitecture
from inference.weights.gguf_dequantize import dequantize, to_bfloat16_bits
from inference.weights.gguf_import import import_gguf
from inference.weights.gguf_reader import read_gguf
from inference.weights.gguf_tokenizer import build_tokenizer
from tests.inference.gguf_files import llama_weights, write_llama

Kind = gguf.GGMLQuantizationType


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    return llama_weights()


def _as_float(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_formats_decode_as_the_formats_own_library_says(kind: Kind) -> None:
    values = np.random.default_rng(1).normal(size=(6, 512)).astype(np.float32)
    encoded = gguf.quants.quantize(values, kind)
    expected = gguf.quants.dequantize(encoded, kind)
    got = dequantize(kind.name, np.ascontiguousarray(encoded).view(np.uint8).reshape(-1))
    np.testing.assert_array_equal(got, expected.reshape(-1))


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_k_formats_decode_as_the_formats_own_library_says(kind: Kind) -> None:
    rng = np.random.default_rng(2)
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, size=(40, block_bytes), dtype=np.uint8)
    halves = rng.normal(size=(40, 2)).astype(np.float16).view(np.uint8)
    if kind is Kind.Q6_K:
        blocks[:, -2:] = halves[:, :2]
    else:
        blocks[:, :4] = halves
    expected = gguf.quants.dequantize(blocks, kind)
    got = dequantize(kind.name, blocks.reshape(-1))
    np.testing.assert_allclose(got, expected.reshape(-1), rtol=1e-6, atol=1e-6)


def test_bfloat16_rounds_to_nearest_even() -> None:
    patterns = np.array([0x3F808000, 0x3F818000, 0x3F80FFFF, 0x7F800000, 0x7FC00001], np.uint32)
    bits = to_bfloat16_bits(patterns.view(np.float32))
    assert [hex(b) for b in bits] == ["0x3f80", "0x3f82", "0x3f81", "0x7f80", "0x7fc0"]


def test_weights_are_in_checkpoint_order_and_bfloat16(
    tmp_path: Path, weights: dict[str, np.ndarray]
) -> None:
    write_llama(tmp_path / "m.gguf", weights, Kind.F32)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    loaded = load_torch_file(tmp_path / "out" / "model.safetensors")
    names = {
        "model.layers.1.self_attn.q_proj.weight": "blk.1.attn_q.weight",
        "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
        "model.layers.1.input_layernorm.weight": "blk.1.attn_norm.weight",
        "model.embed_tokens.weight": "token_embd.weight",
    }
    for theirs, ours in names.items():
        expected = _as_float(to_bfloat16_bits(weights[ours]))
        np.testing.assert_array_equal(loaded[theirs].float().numpy(), expected)
    assert not (tmp_path / "out" / "quantized.safetensors").exists()


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
def test_side_file_holds_the_exact_groups(
    kind: Kind, tmp_path: Path, weights: dict[str, np.ndarray]
) -> None:
    write_llama(tmp_path / "m.gguf", weights, kind)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    groups = load_file(tmp_path / "out" / "quantized.safetensors")
    for theirs, ours in (("self_attn.q_proj", "attn_q"), ("mlp.down_proj", "ffn_down")):
        name = f"model.layers.1.{theirs}"
        quants, scales = groups[f"{name}.quants"], groups[f"{name}.scales"].astype(np.float32)
        if kind is Kind.Q8_0:
            numbers = quants.astype(np.float32) - 128
        else:
            numbers = np.stack((quants & 15, quants >> 4), axis=-1).reshape(len(quants), -1)
            numbers = numbers.astype(np.float32) - (8 if kind is Kind.Q4_0 else 0)
        values = numbers * np.repeat(scales, 32, axis=1)
        if kind is Kind.Q4_1:
            values += np.repeat(groups[f"{name}.mins"].astype(np.float32), 32, axis=1)
        original = weights[f"blk.1.{ours}.weight"]
        expected = gguf.quants.dequantize(gguf.quants.quantize(original, kind), kind)
        np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_side_file_keeps_super_blocks_as_the_file_has_them(
    kind: Kind, tmp_path: Path, weights: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes = gguf.GGML_QUANT_SIZES[kind][1]

    def blocks_of(rows: np.ndarray, _: Kind) -> np.ndarray:
        """The format's own library reads these formats and does not write them."""
        blocks = np.random.default_rng(rows.size).integers(
            0, 256, (rows.shape[0], rows.shape[1] // 256, num_bytes), dtype=np.uint8
        )
        for at in (208,) if kind is Kind.Q6_K else (0, 2):
            blocks[..., at : at + 2] = np.array([0, 32], dtype=np.uint8)  # 2**-7
        return blocks.reshape(rows.shape[0], -1)

    monkeypatch.setattr(gguf.quants, "quantize", blocks_of)
    write_llama(tmp_path / "m.gguf", weights, kind)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    kept = load_file(tmp_path / "out" / "quantized.safetensors")
    loaded = load_torch_file(tmp_path / "out" / "model.safetensors")
    suffix = kind.name.lower()
    whole = kept[f"model.layers.1.mlp.down_proj.{suffix}"]
    np.testing.assert_array_equal(whole, blocks_of(weights["blk.1.ffn_down.weight"], kind))
    # Query rows are in checkpoint order, as the plain weights are.
    for stem in ("model.layers.0.self_attn.q_proj", "model.embed_tokens"):
        meant = gguf.quants.dequantize(kept[f"{stem}.{suffix}"], kind)
        rounded = _as_float(to_bfloat16_bits(meant))
        np.testing.assert_array_equal(loaded[f"{stem}.weight"].float().numpy(), rounded)


def test_side_file_names_its_format(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    write_llama(tmp_path / "m.gguf", weights)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    raw = (tmp_path / "out" / "quantized.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    assert header["__metadata__"] == {"format": "blockhouse-groups-32-v1"}


def test_config_is_read_back_by_the_engine(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    write_llama(tmp_path / "m.gguf", weights)
    steps: list[tuple[float, str]] = []
    import_gguf(
        tmp_path / "m.gguf", tmp_path / "out", lambda share, what: steps.append((share, what))
    )
    config = ModelConfig.from_dir(tmp_path / "out")
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 2)
    assert config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings
    # <|im_end|> ends a turn even though the file names only <|endoftext|>.
    assert config.eos_token_ids == (0, 2)
    shares = [share for share, _ in steps]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_an_import_replaces_the_folder_and_leaves_nothing_else(
    tmp_path: Path, weights: dict[str, np.ndarray]
) -> None:
    write_llama(tmp_path / "m.gguf", weights)
    (tmp_path / "store" / "out").mkdir(parents=True)
    (tmp_path / "store" / "out" / "stale").write_text("old")
    import_gguf(tmp_path / "m.gguf", tmp_path / "store" / "out")
    assert [p.name for p in (tmp_path / "store").iterdir()] == ["out"]
    assert not (tmp_path / "store" / "out" / "stale").exists()


def test_byte_level_vocabulary_encodes_and_decodes(
    tmp_path: Path, weights: dict[str, np.ndarray]
) -> None:
    write_llama(tmp_path / "m.gguf", weights)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    encoded = tokenizer.encode("he 12 é a<|im_end|>")
    assert encoded.tokens == ["he", "Ġ", "1", "2", "Ġ", "Ã", "©", "Ġa", "<|im_end|>"]
    assert tokenizer.decode(encoded.ids) == "he 12 é a"


def test_sentencepiece_vocabulary_merges_by_score() -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256))]
    tokens += ["▁", "a", "b", "c", "ab", "bc", "▁abc", "abc"]
    first_piece = 259
    scores = [0.0] * first_piece + [-9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -4.0, -3.0]
    document, config = build_tokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 8,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        }
    )
    tokenizer = Tokenizer.from_str(json.dumps(document))
    assert tokenizer.encode("abc").tokens == ["<s>", "▁abc"]
    # bc has the better score, so it is joined before ab.
    assert tokenizer.encode("cabcc", add_special_tokens=False).tokens == ["▁", "c", "abc", "c"]
    text = "ab 世 c"
    encoded = tokenizer.encode(text, add_special_tokens=False)
    assert "<0xE4>" in encoded.tokens
    assert tokenizer.decode(encoded.ids) == text
    assert config["add_bos_token"] is True


# ---- broken and hostile files (C18) -------------------------------------------------------------


def _head(version: int = 3, tensors: int = 0, entries: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def _key(name: str, type_id: int) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", type_id)


HOSTILE = {
    "empty": b"",
    "other": b"PK\x03\x04" + bytes(64),
    "version": _head(version=77),
    "many tensors": _head(tensors=2**60),
    "many entries": _head(entries=2**60),
    "cut": _head(entries=3) + b"\x05",
    "long key": _head(entries=1) + struct.pack("<Q", 2**63) + b"x",
    "long text": _head(entries=1) + _key("a", 8) + struct.pack("<Q", 2**62),
    "long array": _head(entries=1) + _key("a", 9) + struct.pack("<IQ", 8, 2**61),
    "array past the end": _head(entries=1) + _key("a", 9) + struct.pack("<IQ", 10, 7_000_000),
    "nested array": _head(entries=1) + _key("a", 9) + struct.pack("<IQ", 9, 4),
    "unknown value": _head(entries=1) + _key("a", 99),
    "not utf-8": _head(entries=1) + struct.pack("<Q", 1) + b"\xff" + struct.pack("<I", 0),
    "bad alignment": _head(entries=1) + _key("general.alignment", 4) + struct.pack("<I", 0),
    "no dimensions": _head(tensors=1) + struct.pack("<Q", 1) + b"t" + struct.pack("<I", 0),
    "absurd shape": _head(tensors=1)
    + struct.pack("<Q", 1)
    + b"t"
    + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0),
    "absurd offset": _head(tensors=1)
    + struct.pack("<Q", 1)
    + b"t"
    + struct.pack("<IQIQ", 1, 4, 0, 2**63),
    "unsupported format": _head(tensors=1)
    + struct.pack("<Q", 1)
    + b"t"
    + struct.pack("<IQIQ", 1, 256, 16, 0),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_c18_hostile_file_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(ModelLoadError, match=r"hostile\.gguf"):
        read_gguf(path)


def test_file_cut_in_its_tensors_is_refused_and_leaves_nothing(
    tmp_path: Path, weights: dict[str, np.ndarray]
) -> None:
    write_llama(tmp_path / "m.gguf", weights)
    whole = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:-1000])
    with pytest.raises(ModelLoadError, match="cut short"):
        import_gguf(tmp_path / "cut.gguf", tmp_path / "store" / "out")
    assert not (tmp_path / "store").exists()


def test_missing_and_unknown_tensors_are_named(
    tmp_path: Path, weights: dict[str, np.ndarray]
) -> None:
    less = {name: values for name, values in weights.items() if name != "blk.1.attn_v.weight"}
    write_llama(tmp_path / "less.gguf", less)
    with pytest.raises(ModelLoadError, match=r"lacks 1 tensors: blk\.1\.attn_v\.weight"):
        import_gguf(tmp_path / "less.gguf", tmp_path / "store" / "out")
    more = weights | {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    write_llama(tmp_path / "more.gguf", more)
    with pytest.raises(ModelLoadError, match="attn_sinks"):
        import_gguf(tmp_path / "more.gguf", tmp_path / "store" / "out")
    assert list((tmp_path / "store").iterdir()) == []


def test_other_architectures_and_splitters_are_refused_by_name(
    tmp_path: Path, weights: dict[str, np.ndarray]
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedArchitecture, match="mamba"):
        import_gguf(tmp_path / "other.gguf", tmp_path / "out")
    write_llama(tmp_path / "pre.gguf", weights, pre="martian")
    with pytest.raises(ModelLoadError, match="martian"):
        import_gguf(tmp_path / "pre.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
