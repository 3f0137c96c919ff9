"""Linear projections, alone or several on the same input kept as one weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from workerkit.framework.interfaces.kernels import Kernels


class MergedLinear(torch.nn.Module):
    """Projections of one input, their outputs side by side: one matrix product where a checkpoint has several.

    `bind` comes between filling the weight and the first product, and again after every change of the weight.
    """

    def __init__(
        self,
        in_features: int,
        outputs: Mapping[str, int],
        bias: bool,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.kernels = kernels
        self.product: Callable[[torch.Tensor], torch.Tensor]
        self.outputs = dict(outputs)  # checkpoint name of each projection -> its output size, in order
        total = sum(outputs.values())
        self.weight = torch.nn.Parameter(
            torch.empty(total, in_features, dtype=dtype, device=device), requires_grad=False
        )
        self.bias = (
            torch.nn.Parameter(torch.empty(total, dtype=dtype, device=device), requires_grad=False) if bias else None
        )

    def bind(self) -> None:
        """Let the kernels take the weight in the form that suits them."""
        self.product = self.kernels.linear(self.weight, self.bias)

    def release(self) -> None:
        """Back to unbound; the kernels' form of the weight goes away."""
        del self.product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_features] -> [T, sum of outputs]."""
        return self.product(x)

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
        self,
        name: str,
        in_features: int,
        out_features: int,
        bias: bool,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(in_features, {name: out_features}, bias, kernels, dtype, device)
