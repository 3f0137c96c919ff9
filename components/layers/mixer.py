"""What mixes the tokens of a sequence in a decoder's layer: attention, or a recurrence."""

from __future__ import annotations

import abc

import attrs
import torch

from workerkit.components.layers.weights import Destination
from workerkit.framework.interfaces.model import Attend
from workerkit.framework.interfaces.recurrent import RecurrentBatch, RecurrentLayer, StateSpec


@attrs.frozen(kw_only=True, eq=False)
class LayerContext:
    """What a forward hands to each of its layers."""

    cos: torch.Tensor  # [T, rotary_dim / 2]
    sin: torch.Tensor  # likewise
    attend: Attend
    recurrent: RecurrentBatch | None = None  # of networks with recurrent layers


class Mixer(torch.nn.Module, abc.ABC):
    """The first half of a layer, between its norm and the residual stream."""

    @abc.abstractmethod
    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """[T, input size] -> [T, H]."""

    @abc.abstractmethod
    def destinations(self) -> dict[str, Destination]:
        """Checkpoint name below the layer (`self_attn.q_proj.weight`) -> where the tensor goes."""


class RecurrentMixer(Mixer):
    """One that keeps a state instead of keys and values: `context.recurrent` says where."""

    layer: RecurrentLayer


def conv_and_ssm(
    name: str, index: int, conv: tuple[int, ...], ssm: tuple[int, ...], dtype: torch.dtype
) -> RecurrentLayer:
    """A layer that keeps the latest inputs of a short convolution, as activations, and a state in float32."""
    return RecurrentLayer(
        name=name,
        index=index,
        states=(
            StateSpec(name="conv", shape=conv, dtype=str(dtype).removeprefix("torch.")),
            StateSpec(name="ssm", shape=ssm, dtype="float32"),
        ),
    )
