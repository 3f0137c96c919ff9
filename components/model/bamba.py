"""Bamba: layers of Mamba-2, and attention with a partial rotary embedding between them."""

from __future__ import annotations

from workerkit.components.layers.mamba2 import Mamba2Mixer
from workerkit.components.layers.mixer import Mixer
from workerkit.components.layers.mlp import GatedMLP
from workerkit.components.layers.moe import SparseMLP
from workerkit.components.layers.weights import Destination
from workerkit.components.model.decoder import Decoder
from workerkit.framework.interfaces.kv_cache import AttentionLayer

_NAMES = {"model.norm.": "model.final_layernorm.", ".post_attention_layernorm.": ".pre_ff_layernorm."}


class Bamba(Decoder):
    """A decoder with names of its own, whose recurrent layers are Mamba-2's."""

    def make_mixer(self, number: int, layer: AttentionLayer | None) -> Mixer:
        if layer is not None:
            return super().make_mixer(number, layer)
        config, place = self.config, self.config.recurrent_layers.index(number)
        assert config.mamba2 is not None, "the loader reads it for this architecture"
        return Mamba2Mixer(
            config.mamba2,
            config.hidden_size,
            config.rms_norm_eps,
            f"model.layers.{number}.mamba",
            place,
            self.kernels,
            self.dtype,
            self.device,
        )

    def make_mlp(self, number: int) -> GatedMLP | SparseMLP | None:
        config = self.config
        inner, bias, act = config.intermediate_size, config.mlp_bias, config.hidden_act
        return GatedMLP(
            config.hidden_size, inner, bias, self.kernels, self.dtype, self.device, act, room="feed_forward"
        )

    def required_tensors(self) -> dict[str, Destination]:
        return {_own_name(name): place for name, place in super().required_tensors().items()}


def _own_name(name: str) -> str:
    for usual, own in _NAMES.items():
        name = name.replace(usual, own)
    return name
