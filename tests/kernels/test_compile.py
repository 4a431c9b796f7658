"""Triton kernels compile for devices that are not here, in a process of their own."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.kernels.triton_cases import CASES

CAPABILITIES = (80, 90)
# Bytes of shared memory that one program may take: 163 KiB on sm_80, 227 KiB on sm_90.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
REGISTERS_OF_A_MULTIPROCESSOR = 65_536


@pytest.fixture(scope="module")
def usages() -> list[dict]:
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_triton", *map(str, CAPABILITIES)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_kernel_compiles_for_both_architectures(usages) -> None:
    assert CASES
    for capability in CAPABILITIES:
        assert {u["case"] for u in usages if u["capability"] == capability} == set(CASES)


def test_no_kernel_spills_registers(usages) -> None:
    assert [u for u in usages if u["stack"]] == []


def test_every_program_fits_a_multiprocessor(usages) -> None:
    for usage in usages:
        assert usage["shared"] <= SHARED_LIMIT[usage["capability"]], usage
        used = usage["registers"] * usage["num_warps"] * 32
        assert 0 < used <= REGISTERS_OF_A_MULTIPROCESSOR, usage


def test_16_bit_attention_uses_tensor_cores(usages) -> None:
    attention = [u for u in usages if u["kernel"].startswith("_paged_")]
    assert attention
    for usage in attention:
        assert usage["uses_tensor_cores"] == ("fp32" not in usage["case"]), usage
