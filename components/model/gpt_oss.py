"""GPT-OSS: attention with sinks, windows in every other layer, experts with biases and an activation of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs
import torch

from workerkit.components.layers.attention import Attention
from workerkit.components.layers.mixer import LayerContext, Mixer
from workerkit.components.layers.moe import ExpertWeights, SparseMLP
from workerkit.components.layers.weights import Destination, Weight, destination
from workerkit.components.model.decoder import Decoder
from workerkit.framework.errors import ModelError
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import AttentionLayer
from workerkit.framework.interfaces.model import ModelConfig, QuantizedTensor

# Twice the values of a 4-bit float: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats, 2023).
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class GptOss(Decoder):
    """Raises ModelError when the config has no numbers of experts."""

    def __init__(self, config: ModelConfig, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        if config.moe is None:
            raise ModelError(f"{config.architecture} needs the numbers of experts: model_type 'gpt_oss' has them")
        super().__init__(config, kernels, dtype, device)

    def make_mixer(self, number: int, layer: AttentionLayer | None) -> Mixer:
        assert layer is not None, "all layers have attention"
        return SinkAttention(self.config, layer, self.kernels, self.dtype, self.device)

    def make_mlp(self, number: int) -> SparseMLP:
        assert self.config.moe is not None, "checked above"
        experts = FusedExperts(
            self.config.moe,
            self.config.hidden_size,
            ("gate_proj", "up_proj", "down_proj"),
            self.kernels,
            self.dtype,
            self.device,
            bias=True,
            act="swigluoai",
        )
        return SparseMLP(experts, "mlp", router="router", router_bias=True)


class SinkAttention(Attention):
    """Each head has a logit that takes part in the softmax and stands for no value."""

    def __init__(
        self,
        config: ModelConfig,
        layer: AttentionLayer,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(config, layer, kernels, dtype, device)
        sinks = torch.empty(layer.num_heads, dtype=dtype, device=device)
        self.sinks = torch.nn.Parameter(sinks, requires_grad=False)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: LayerContext
    ) -> torch.Tensor:
        context = attrs.evolve(context, attend=partial(context.attend, sinks=self.sinks))
        return super().attend(query, key, value, context)

    def destinations(self) -> dict[str, Destination]:
        return super().destinations() | {"self_attn.sinks": destination(self.sinks)}


class FusedExperts(ExpertWeights):
    """Experts whose files have one tensor for all, its outputs those of gate and up in turns: [E, in, out] plain, or
    [E, out, in] in 4 bits with `config.mxfp4`."""

    def destinations(self) -> dict[str, Destination]:
        places = super().destinations()
        number, hidden, inner = self.config.num_experts, self.hidden, self.config.intermediate_size
        fused: dict[str, Destination] = {}
        for name, parts, size_in, size_out in (
            ("gate_up_proj", ("gate_proj", "up_proj"), hidden, 2 * inner),
            ("down_proj", ("down_proj",), inner, hidden),
        ):
            weights = [[places[f"{n}.{part}.weight"] for part in parts] for n in range(number)]
            biases = [[places[f"{n}.{part}.bias"] for part in parts] for n in range(number)]
            fused[f"{name}_bias"] = Destination((number, size_out), partial(_fill_plain, biases))
            if self.config.mxfp4:
                packed = _Packed(weights)
                shape = (number, size_out, size_in // 32)
                fused[f"{name}_blocks"] = Destination((*shape, 16), partial(packed.add, 0))
                fused[f"{name}_scales"] = Destination(shape, partial(packed.add, 1))
            else:
                fused[name] = Destination((number, size_in, size_out), partial(_fill_plain, weights))
        return fused


class _Packed:
    """Waits for both tensors of a weight in 4 bits."""

    def __init__(self, places: Sequence[Sequence[Destination]]) -> None:
        self._places = places
        self._found: dict[int, torch.Tensor] = {}

    def add(self, index: int, tensor: Weight) -> None:
        """index: 0 for blocks, 1 for scales."""
        assert isinstance(tensor, torch.Tensor), "its file has bytes"
        self._found[index] = tensor
        if len(self._found) == 2:
            _fill(self._places, [self._found[0], self._found[1]], from_mxfp4)
            self._found.clear()


def _fill_plain(places: Sequence[Sequence[Destination]], tensor: Weight) -> None:
    """Biases [E, out], or weights [E, in, out]."""
    assert isinstance(tensor, torch.Tensor), "no file packs what all experts have in one"
    _fill(places, [tensor.transpose(1, -1)], lambda part: part)


def _fill(
    places: Sequence[Sequence[Destination]], tensors: Sequence[torch.Tensor], make: Callable[..., Weight]
) -> None:
    """tensors [E, rows, ...] -> what `make` makes of every n-th row of an expert goes into its n places, in turns."""
    for expert, own in enumerate(places):
        for first, place in enumerate(own):
            place.fill(make(*(tensor[expert, first :: len(own)] for tensor in tensors)))


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> QuantizedTensor:
    """blocks uint8 [O, H / 32, 16], two 4-bit floats a byte, the first one in its low half; scales uint8 [O, H / 32],
    exponents of 2 plus 127 -> the same numbers in codes of 8 bits [O, H]."""
    values = torch.tensor(_E2M1, dtype=torch.int8, device=blocks.device)
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).int()
    powers = (scales.int() << 23).view(torch.float32)  # the exponent of a float32 lies there, with 127 added as well
    return QuantizedTensor(codes=values[halves].flatten(1), scales=powers / 2)
