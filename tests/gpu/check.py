"""`tests/gpu/run.sh` runs this: correctness first, then, on a GPU, speed. See there."""

import argparse
import contextlib
import importlib
import importlib.abc
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from unittest import mock

import torch

from kernels.backends import Backend, is_interpreting

# What a machine that only computes does not have.
WEB_PACKAGES = ("django", "channels", "asgiref", "daphne", "pydantic", "ninja", "celery", "redis")
_OPS = (
    *("kv_cache_write", "paged_attention", "quant_linear", "rms_norm", "rotary_kv_write"),
    *("sampling", "silu_and_mul"),
)


class NoWebPackages(importlib.abc.MetaPathFinder):
    """Makes the web packages look as if they were not installed, so that none is needed here."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in WEB_PACKAGES:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


@contextlib.contextmanager
def triton_everywhere() -> Iterator[None]:
    """The ops take Triton for tensors of the CPU too, as an engine on a GPU does."""
    with contextlib.ExitStack() as stack:
        for op in _OPS:
            module = importlib.import_module(f"kernels.{op}")
            stack.enter_context(mock.patch.object(module, "choose", return_value=Backend.TRITON))
        yield


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true", help="small, in Triton's interpreter")
    is_small = parser.parse_args().small
    if not is_small and not torch.cuda.is_available():
        print("There is no CUDA device. tests/gpu/run.sh --small runs without one.")
        return 2
    if is_small and not is_interpreting():
        print("The small mode needs TRITON_INTERPRET=1; tests/gpu/run.sh sets it.")
        return 2
    sys.meta_path.insert(0, NoWebPackages())
    from tests.gpu.correctness import check_all
    from tests.gpu.report import Report

    report = Report()
    if is_small:
        torch.set_num_threads(1)
        with triton_everywhere():
            check_all(report, torch.device("cpu"), is_small=True)
        report.print("Small, on the CPU in Triton's interpreter; no speed is measured.")
    else:
        from tests.gpu.timings import measure_all

        check_all(report, torch.device("cuda"), is_small=False)
        measure_all(report)
        name = torch.cuda.get_device_name()
        report.print(f"{name}, torch {torch.__version__}")
    return int(report.has_failed)


if __name__ == "__main__":
    sys.exit(main())
