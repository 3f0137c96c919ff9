"""Linear projections, alone or several on the same input kept as one weight."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class MergedLinear(torch.nn.Module):
    """Projections of one input, their outputs side by side: one matrix product where a checkpoint has several."""

    def __init__(
        self, in_features: int, outputs: Mapping[str, int], bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.outputs = dict(outputs)  # checkpoint name of each projection -> its output size, in order
        total = sum(outputs.values())
        self.weight = torch.nn.Parameter(
            torch.empty(total, in_features, dtype=dtype, device=device), requires_grad=False
        )
        self.bias = (
            torch.nn.Parameter(torch.empty(total, dtype=dtype, device=device), requires_grad=False) if bias else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_features] -> [T, sum of outputs]."""
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """`q_proj.weight` and the like -> the view of the merged tensor that it fills."""
        views: dict[str, torch.Tensor] = {}
        start = 0
        for name, size in self.outputs.items():
            views[f"{name}.weight"] = self.weight[start : start + size]
            if self.bias is not None:
                views[f"{name}.bias"] = self.bias[start : start + size]
            start += size
        return views


class Linear(MergedLinear):
    """One projection."""

    def __init__(
        self, name: str, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(in_features, {name: out_features}, bias, dtype, device)
