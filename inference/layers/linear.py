"""Matrix products with the checkpoint's weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.quant_linear import MAX_ROWS, quant_linear
from kernels.quant_linear.packing import QuantWeight


class Linear(nn.Module):
    """`inputs @ weight.T + bias`; several of a checkpoint's matrices may be stacked into one.

    Args:
        in_size: width of the input.
        part_sizes: rows of each stacked matrix, in order; the output is as wide as their sum.
        bias: whether every part has a bias.
    """

    def __init__(
        self,
        in_size: int,
        *part_sizes: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.part_sizes = part_sizes
        self.weight = _empty(sum(part_sizes), in_size, dtype=dtype, device=device)
        self.bias = _empty(sum(part_sizes), dtype=dtype, device=device) if bias else None
        # The same weights as they are quantised, for few rows, rows under rows: one matrix, or
        # several where parts differ in form. None, or all of them; see `inference.weights.groups`.
        self.groups: tuple[QuantWeight, ...] = ()

    def forward(self, inputs: Tensor, *, few_rows: bool) -> Tensor:
        """[num_tokens, sum(part_sizes)] from [num_tokens, in_size].

        Args:
            few_rows: groups may be read instead of the weights, where there are some.
        """
        if few_rows and self.groups and 1 <= inputs.shape[0] <= MAX_ROWS:
            return self._from_groups(inputs)
        return F.linear(inputs, self.weight, self.bias)

    def _from_groups(self, inputs: Tensor) -> Tensor:
        sizes = [part.num_columns for part in self.groups]
        biases = [None] * len(sizes) if self.bias is None else torch.split(self.bias, sizes)
        outputs = [
            quant_linear(inputs, part, bias) for part, bias in zip(self.groups, biases, strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _empty(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
