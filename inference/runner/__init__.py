"""From a scheduled step to sampled tokens: batch tensors and the forward pass."""
