"""What a model is loaded with where the configuration leaves it open."""

import torch

from inference.config import EngineConfig, ModelConfig
from inference.errors import ModelLoadError
from inference.models.spec import DecoderSpec

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def choose_device(asked: str) -> torch.device:
    """`auto` takes a CUDA device where there is one.

    Raises:
        ModelLoadError: cuda was asked for and there is none.
    """
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ModelLoadError(
            "The device is set to cuda, but PyTorch finds no CUDA device. Set it to auto or cpu, "
            "or check the driver."
        )
    return torch.device("cuda", torch.cuda.current_device())


def choose_dtype(asked: str, device: torch.device) -> torch.dtype:
    """`auto` of the torch forward pass: fp32 on the CPU, where 16 bit is slower, else bf16."""
    if asked == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES[asked]


def choose_max_model_len(config: EngineConfig, model_config: ModelConfig, spec: DecoderSpec) -> int:
    """The model's usual length unless another is set; a stretched form may reach further.

    Raises:
        ModelLoadError: more was asked than the model reaches.
    """
    if config.max_model_len is None:
        return model_config.max_position
    longest = min((rope.longest for rope in spec.ropes), default=model_config.max_position)
    if config.max_model_len > longest:
        raise ModelLoadError(
            f"max_model_len is {config.max_model_len:,}, but the model reaches "
            f"{longest:,} tokens. Set it to that or less."
        )
    return config.max_model_len


def device_name(device: torch.device) -> str:
    """For people."""
    if device.type == "cpu":
        return "cpu"
    return f"{device} {torch.cuda.get_device_name(device)}"
