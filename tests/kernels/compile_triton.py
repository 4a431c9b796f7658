"""Compiles Triton kernels for a CUDA device that need not be here; prints what each one takes.

The public ops are called with tensors of the meta device, so what is compiled is what they launch.
`python -m tests.kernels.compile_triton 90 80`; not with TRITON_INTERPRET, and in no process that
has used it.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kernels.paged_attention import triton_prefill
from tests.kernels.triton_cases import CASES

_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}
_OPTIONS = ("num_warps", "num_stages")


@dataclass
class Usage:
    """What one compiled kernel takes of a multiprocessor."""

    case: str
    kernel: str
    capability: int
    registers: int
    # Bytes of each thread's stack: not 0 when registers were spilled.
    stack: int
    shared: int
    num_warps: int
    uses_tensor_cores: bool


@dataclass
class Launch:
    case: str
    source: ASTSource
    options: dict[str, int]


def launches_of(case: str, call: Callable[[], Any]) -> list[Launch]:
    """What `call` would have launched."""
    found: list[Launch] = []

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        values = dict(zip(self.arg_names, args, strict=False)) | kwargs
        found.append(Launch(case, source_of(self, values), options))

    original = JITFunction.run
    JITFunction.run = record
    try:
        call()
    finally:
        JITFunction.run = original
    return found


def source_of(kernel: JITFunction, values: dict[str, Any]) -> ASTSource:
    """As a launch specialises: what is not there, whole numbers of 1, and what 16 divides."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        is_special = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (is_special and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        if isinstance(value, Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
        else:
            signature[parameter.name] = "fp32"
        is_aligned = isinstance(value, Tensor) and not parameter.do_not_specialize_on_alignment
        if is_aligned or (is_special and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def compile_one(launch: Launch, capability: int) -> Usage:
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(launch.source, target=target, options=launch.options)
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    cubin = Path(compiled.metadata_group[f"{compiled.metadata.name}.cubin"])
    shown = subprocess.run(
        [folder / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", shown))
    return Usage(
        case=launch.case,
        kernel=compiled.metadata.name,
        capability=capability,
        registers=int(numbers["REG"]),
        stack=int(numbers["STACK"]) + int(numbers["LOCAL"]),
        shared=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps,
        uses_tensor_cores="mma" in compiled.asm["ptx"],
    )


def main() -> None:
    capabilities = [int(argument) for argument in sys.argv[1:]]
    jobs: list[tuple[Launch, int]] = []
    for capability in capabilities:
        with mock.patch.object(triton_prefill, "is_hopper", return_value=capability >= 90):
            for case, call in CASES.items():
                jobs += [(launch, capability) for launch in launches_of(case, call)]
    with ThreadPoolExecutor(2) as pool:  # ptxas, half of the time, is a process of its own
        usages = list(pool.map(lambda job: compile_one(*job), jobs))
    print(json.dumps([asdict(usage) for usage in usages]))


if __name__ == "__main__":
    main()
