"""Configuration of one engine, and a model's shape as read from its checkpoint. No torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inference.errors import InferenceError, ModelLoadError

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "int8")
DEVICES = ("auto", "cpu", "cuda")
BLOCK_SIZES = (8, 16, 32)


class InvalidConfig(InferenceError):
    """An engine setting is out of its range; the message names it and what is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine is started with. Live settings (slots and the like) can change afterwards."""

    model_dir: Path
    device: str = "auto"
    dtype: str = "auto"
    # Of keys and values: auto is the calculation's own; int8 holds nearly twice as many tokens.
    kv_dtype: str = "auto"
    # Tokens a KV block holds.
    block_size: int = 16
    # Blocks in the pool; None sizes it from memory.
    num_blocks: int | None = None
    # Most bytes of the KV pool; None takes a share of the device's memory.
    kv_memory_bytes: int | None = None
    # Parallel slots at start; None lets the engine choose from memory and context length.
    max_num_seqs: int | None = None
    # Token budget: most tokens one step computes; None takes the device's default.
    max_num_batched_tokens: int | None = None
    # Longest prompt plus answer; None takes the model's own limit.
    max_model_len: int | None = None
    max_waiting_requests: int = 1000
    max_waiting_tokens: int = 2_000_000
    # Slots that only interactive requests may take.
    reserved_interactive_slots: int = 0
    enable_prefix_cache: bool = True
    # continuous, or static: the baseline that the product can show beside it.
    policy: str = "continuous"
    num_threads: int | None = None
    # native lets the engine use the compiled CPU step where it can; torch forbids it.
    cpu_backend: str = "native"
    # Kernels of the compiled step (`kernels.native.library.usable_kernels`); None takes the best.
    cpu_kernels: str | None = None
    # Whether few rows read quantised groups where the folder has them, or bf16 alone: in the
    # compiled CPU step and on CUDA.
    use_groups: bool = True

    def validate(self) -> None:
        """Raises InvalidConfig with the setting, what it got and what is allowed."""
        _one_of("device", self.device, DEVICES)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        _one_of("block_size", self.block_size, BLOCK_SIZES)
        _one_of("policy", self.policy, ("continuous", "static"))
        _one_of("cpu_backend", self.cpu_backend, ("native", "torch"))
        for name in (
            "num_blocks",
            "kv_memory_bytes",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "num_threads",
        ):
            got = getattr(self, name)
            if got is not None and (not isinstance(got, int) or got < 1):
                raise InvalidConfig(f"{name} is {got!r}; a whole number of at least 1 is allowed.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only model, in our words, from a checkpoint's config.json."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    # The checkpoint's own fields, for what only some families have.
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_dir(cls, model_dir: Path) -> "ModelConfig":
        """Read `config.json` (and `generation_config.json` for further end-of-sequence ids).

        Raises:
            ModelLoadError: the file is missing, is not JSON, or lacks or has absurd sizes.
        """
        raw = _read_json(model_dir / "config.json")
        generation_path = model_dir / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.exists() else {}
        try:
            num_heads = int(raw["num_attention_heads"])
            hidden_size = int(raw["hidden_size"])
            rope = raw.get("rope_parameters") or {}
            config = cls(
                architecture=str(raw["architectures"][0]),
                vocab_size=int(raw["vocab_size"]),
                hidden_size=hidden_size,
                intermediate_size=int(raw["intermediate_size"]),
                num_layers=int(raw["num_hidden_layers"]),
                num_heads=num_heads,
                num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
                head_dim=int(raw.get("head_dim") or hidden_size // num_heads),
                max_position=int(raw["max_position_embeddings"]),
                rms_norm_eps=float(raw.get("rms_norm_eps", 1e-5)),
                rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta") or 10000.0),
                tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
                eos_token_ids=_eos_ids(raw, generation),
                bos_token_id=raw.get("bos_token_id"),
                raw=raw,
            )
        except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError) as exc:
            raise ModelLoadError(
                f"{model_dir / 'config.json'} is not a decoder model's configuration: "
                f"{type(exc).__name__} {exc}."
            ) from exc
        config._check_sizes(model_dir)
        return config

    def _check_sizes(self, model_dir: Path) -> None:
        limits = {
            "vocab_size": 2_000_000,
            "hidden_size": 65_536,
            "intermediate_size": 1_000_000,
            "num_layers": 512,
            "num_heads": 1_024,
            "num_kv_heads": 1_024,
            "head_dim": 1_024,
            "max_position": 100_000_000,
        }
        for name, limit in limits.items():
            got = getattr(self, name)
            if not 1 <= got <= limit:
                raise ModelLoadError(
                    f"{model_dir / 'config.json'}: {name} is {got}; 1 to {limit:,} is allowed."
                )
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"{model_dir / 'config.json'}: {self.num_heads} attention heads cannot share "
                f"{self.num_kv_heads} key-value heads evenly."
            )


def _eos_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    found: list[int] = []
    for config in configs:
        value = config.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None and int(token_id) not in found:
                found.append(int(token_id))
    return tuple(found)


def _one_of(name: str, got: object, allowed: tuple[object, ...]) -> None:
    if got not in allowed:
        listed = ", ".join(map(str, allowed))
        raise InvalidConfig(f"{name} is {got!r}; allowed are {listed}.")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path} does not exist; a model folder needs it.") from None
    except (OSError, ValueError) as exc:
        raise ModelLoadError(f"{path} cannot be read: {exc}") from exc
    if not isinstance(loaded, dict):
        raise ModelLoadError(f"{path} holds no JSON object.")
    return loaded
