"""Mixtures of experts, one product for all tokens of an expert."""

from __future__ import annotations

import torch

from workerkit.kernels.reference.experts import PlainExperts


class GroupedExperts(PlainExperts):
    """Tokens are sorted by expert, so that each expert that any token goes to is read and multiplied by once."""

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor) -> torch.Tensor:
        """x [T, H], expert_ids [T, k] int64 and their weights [T, k] float32 -> [T, H], the weighted sum."""
        per_token = expert_ids.shape[1]
        order = expert_ids.flatten().argsort(stable=True)
        tokens = order // per_token
        counts = torch.bincount(expert_ids.flatten(), minlength=len(self.gate_up)).tolist()
        outputs = torch.empty(len(order), x.shape[1], dtype=x.dtype, device=x.device)
        pieces = zip(torch.split(x[tokens], counts), torch.split(outputs, counts), strict=True)
        for expert, (rows, target) in enumerate(pieces):  # over the experts: their products differ in size
            if len(rows):
                target.copy_(self._one(rows, expert))
        weighted = outputs.float() * expert_weights.flatten()[order].unsqueeze(1)
        # A token's parts in the order in which its router named them, whatever the other tokens are.
        result = torch.empty_like(weighted).index_copy_(0, order, weighted)
        return result.view(len(x), per_token, -1).sum(1).to(x.dtype)


def experts(gate_up: torch.Tensor, down: torch.Tensor) -> GroupedExperts:
    """gate_up [E, 2 I, H], down [E, H, I] -> the experts that tokens are sent to."""
    return GroupedExperts(gate_up, down)
