"""Decoders whose MLPs are mixtures of experts."""

from __future__ import annotations

from workerkit.components.layers.mlp import GatedMLP
from workerkit.components.layers.moe import ExpertWeights, SparseMLP
from workerkit.components.model.decoder import Decoder
from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.sections import QuantizationSection


class Mixtral(Decoder):
    """A router and experts in every layer."""

    room = "block_sparse_moe"
    expert_names = ("w1", "w3", "w2")  # gate, up, down

    def quantize(self, section: QuantizationSection) -> None:
        if section.of("mlp") not in ("none", "keep"):
            raise UnsupportedError(
                f"model.quantization.mlp: experts of {self.config.architecture} are kept in model.dtype: right would"
                " be none, with other kinds of layers named one by one"
            )
        super().quantize(section)

    def make_mlp(self, number: int) -> GatedMLP | SparseMLP | None:
        moe = self.config.moe
        assert moe is not None, "the loader reads it for this architecture"
        if number not in moe.sparse_layers:
            return None
        hidden, names = self.config.hidden_size, self.expert_names
        return SparseMLP(ExpertWeights(moe, hidden, names, self.kernels, self.dtype, self.device), self.room)


class Qwen3Moe(Mixtral):
    """Likewise, but for the layers that the config leaves out."""

    room = "mlp"
    expert_names = ("gate_proj", "up_proj", "down_proj")
