"""Triton kernels as Python on the CPU: `TRITON_INTERPRET=1 python -m pytest tests/kernels_triton`.

Triton decides at its import, so these tests are a process of their own; without the variable they
are not collected. deploy/test runs them.
"""

import os

from tests.kernels.conftest import empty_memory_is_nan, rng

__all__ = ["empty_memory_is_nan", "rng"]

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
