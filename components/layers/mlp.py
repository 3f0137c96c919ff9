"""The gated MLP of a decoder's layer."""

from __future__ import annotations

import torch

from workerkit.components.layers.linear import Linear, MergedLinear
from workerkit.components.layers.weights import Destination
from workerkit.framework.interfaces.kernels import GatedActivation, Kernels

ACTIVATIONS = {"silu": "silu_and_mul", "gelu_pytorch_tanh": "gelu_tanh_and_mul"}  # Hugging Face's name -> op


class GatedMLP(torch.nn.Module):
    """down(act(gate(x)) * up(x)). `act`: Hugging Face's name of it."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        bias: bool,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        act: str = "silu",
    ) -> None:
        super().__init__()
        self.activate: GatedActivation = getattr(kernels, ACTIVATIONS[act])
        gate_up = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = MergedLinear(hidden, gate_up, bias, kernels, dtype, device, "mlp")
        self.down_proj = Linear("down_proj", inner, hidden, bias, kernels, dtype, device, "mlp")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        result: torch.Tensor = self.down_proj(self.activate(self.gate_up_proj(x)))
        return result

    def destinations(self) -> dict[str, Destination]:
        """Checkpoint name below the layer -> where the tensor goes."""
        places = self.gate_up_proj.destinations() | self.down_proj.destinations()
        return {f"mlp.{name}": place for name, place in places.items()}
