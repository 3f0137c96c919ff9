"""The gated MLP of a decoder's layer."""

from __future__ import annotations

import torch

from workerkit.components.layers.linear import Linear, MergedLinear
from workerkit.components.layers.weights import Destination
from workerkit.framework.interfaces.kernels import GatedActivation, Kernels

ACTIVATIONS = {  # Hugging Face's name, or vLLM's where that has none -> op
    "silu": "silu_and_mul",
    "gelu_pytorch_tanh": "gelu_tanh_and_mul",
    "swigluoai": "swigluoai_and_mul",
}


class GatedMLP(torch.nn.Module):
    """down(act(gate(x)) * up(x)). `act`: a name of ACTIVATIONS.

    room: where its tensors are below a layer in a checkpoint; names: of its gate, up and down projections there.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        bias: bool,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        act: str = "silu",
        room: str = "mlp",
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        super().__init__()
        self.room = room
        self.activate: GatedActivation = getattr(kernels, ACTIVATIONS[act])
        gate, up, down = names
        self.gate_up_proj = MergedLinear(hidden, {gate: inner, up: inner}, bias, kernels, dtype, device, "mlp")
        self.down_proj = Linear(down, inner, hidden, bias, kernels, dtype, device, "mlp")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        result: torch.Tensor = self.down_proj(self.activate(self.gate_up_proj(x)))
        return result

    def destinations(self) -> dict[str, Destination]:
        """Checkpoint name below the layer -> where the tensor goes."""
        places = self.gate_up_proj.destinations() | self.down_proj.destinations()
        return {f"{self.room}.{name}": place for name, place in places.items()}
