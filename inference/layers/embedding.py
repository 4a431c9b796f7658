"""Token ids to vectors, and vectors to logits."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    """Rows of the embedding matrix, times `scale` rounded to the model's dtype."""

    def __init__(
        self, vocab_size: int, size: int, *, scale: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        empty = torch.empty(vocab_size, size, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.scale = torch.tensor(scale, dtype=dtype).item()

    def forward(self, input_ids: Tensor) -> Tensor:
        """[num_tokens, size] from [num_tokens] int64."""
        rows = F.embedding(input_ids, self.weight)
        return rows if self.scale == 1.0 else rows * self.scale
