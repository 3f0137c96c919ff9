"""What is left of the target's distribution where a draft was rejected."""

from __future__ import annotations

import torch


def residual_probs(probs: torch.Tensor, draft_probs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """probs, draft_probs [N, V] float32, weights [N] in 0..1 -> [N, V] float32: max(weight * prob - draft_prob, 0), not
    normalised. Its sum is what block verification calls the excess."""
    return (probs * weights.to(probs.dtype)[:, None]).sub_(draft_probs).clamp_(min=0)
