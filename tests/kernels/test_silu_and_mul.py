import pytest
import torch

from kernels.backends import available
from kernels.errors import KernelArgumentError
from kernels.silu_and_mul import silu_and_mul


@pytest.mark.parametrize("backend", available())
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # CPU rounds silu(gate) before the product: two roundings.
    [(torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)],
)
def test_equals_the_definition(backend, dtype, tolerance, rng) -> None:
    gate_up = (torch.randn(5, 34, generator=rng) * 4).to(dtype)
    before = gate_up.clone()
    gate, up = gate_up.double()[:, :17], gate_up.double()[:, 17:]
    want = gate / (1 + torch.exp(-gate)) * up
    got = silu_and_mul(gate_up, backend=backend)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=tolerance)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("bad", [torch.zeros(2, 7), torch.zeros(8), torch.zeros(2, 8).long()])
def test_refuses_bad_arguments(bad) -> None:
    with pytest.raises(KernelArgumentError, match="gate_up"):
        silu_and_mul(bad)
