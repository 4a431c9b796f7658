"""How a step's work is shared out to threads."""

import threading
from typing import Any

import pytest
import torch

from tests.kernels.native_cases import grouped_linear, random_groups, usable_kernels
from tests.kernels.test_native_attention import native, step

KERNELS = usable_kernels()[0]


@pytest.fixture
def arguments(rng) -> dict[str, Any]:
    return step(rng, [(1, 700), (40, 300), (1, 9), (17, 17), (1, 64)])


def test_the_number_of_threads_may_change_between_calls(arguments) -> None:
    alone = native(KERNELS, arguments)
    for threads in (2, 4, 1, 3, 2):
        torch.set_num_threads(threads)
        for _ in range(20):
            assert torch.equal(native(KERNELS, arguments), alone)


def test_calls_from_two_threads_at_once_are_both_right(rng, arguments) -> None:
    torch.set_num_threads(2)
    linear = grouped_linear(KERNELS, random_groups(rng, 512, 256, bits=4, with_mins=True))
    rows = torch.randn(5, 256, generator=rng).bfloat16()
    rows = rows.to(torch.float32 if KERNELS in ("avx2", "portable") else torch.bfloat16)
    attended, multiplied = native(KERNELS, arguments), linear.run(rows, True)
    wrong: list[str] = []
    start = threading.Barrier(2, timeout=30)

    def attend() -> None:
        start.wait()
        for _ in range(100):
            if not torch.equal(native(KERNELS, arguments), attended):
                wrong.append("attention")

    def multiply() -> None:
        start.wait()
        for _ in range(300):
            if not torch.equal(linear.run(rows, True), multiplied):
                wrong.append("linear")

    workers = [threading.Thread(target=attend), threading.Thread(target=multiply)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    assert not wrong


def test_helpers_that_have_gone_to_sleep_are_woken(arguments) -> None:
    torch.set_num_threads(2)
    alone = native(KERNELS, arguments)
    for _ in range(5):
        # Work elsewhere for longer than helpers look for more: they spin for microseconds.
        sum(range(500_000))
        assert torch.equal(native(KERNELS, arguments), alone)


def test_a_process_ends_while_helpers_sleep(run_python) -> None:
    code = (
        "import torch\n"
        "from kernels.native import library\n"
        "library.load()\n"
        "torch.set_num_threads(3)\n"
        "linear = library.new_linear('portable', 4096, 64)\n"
        "linear.set_dense(torch.zeros(4096, 64))\n"
        "groups = torch.zeros(4096, 32, dtype=torch.uint8)\n"
        "assert linear.add_groups(groups, torch.ones(4096, 2).half(), None)\n"
        "print(linear.run(torch.ones(2, 64), True)[0, 0].item())\n"
    )
    assert run_python(code) == "-512.0"
