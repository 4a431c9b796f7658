"""The formula in fp32."""

from torch import Tensor

from kernels.quant_linear.packing import QuantWeight, unpack


def quant_linear(inputs: Tensor, weight: QuantWeight, bias: Tensor | None) -> Tensor:
    outputs = inputs.float() @ unpack(weight).T
    if bias is not None:
        outputs += bias.float()
    return outputs.to(inputs.dtype)
