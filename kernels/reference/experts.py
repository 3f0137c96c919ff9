"""Mixtures of experts: each token goes through the few experts that a router chose for it."""

from __future__ import annotations

import torch

from workerkit.kernels.reference.activation import silu_and_mul


class PlainExperts:
    """Weights gate_up [E, 2 I, H] and down [E, H, I] of E gated MLPs, as they are."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor) -> torch.Tensor:
        """x [T, H], expert_ids [T, k] int64 and their weights [T, k] float32 -> [T, H], the weighted sum."""
        result = torch.zeros_like(x, dtype=torch.float32)
        for token, ids, weights in zip(range(len(x)), expert_ids.tolist(), expert_weights, strict=True):
            for expert, weight in zip(ids, weights, strict=True):
                result[token] += weight * self._one(x[token], expert).float()
        return result.to(x.dtype)

    def _one(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """[..., H] -> [..., H]."""
        gated = silu_and_mul(torch.nn.functional.linear(x, self.gate_up[expert]))
        return torch.nn.functional.linear(gated, self.down[expert])

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that it keeps."""
        return self.gate_up, self.down


def experts(gate_up: torch.Tensor, down: torch.Tensor) -> PlainExperts:
    """gate_up [E, 2 I, H], down [E, H, I] -> the experts that tokens are sent to."""
    return PlainExperts(gate_up, down)
