"""Decoders whose MLPs are mixtures of experts."""

from __future__ import annotations

import torch

from workerkit.components.layers.mlp import GatedMLP
from workerkit.components.layers.moe import ExpertWeights, SparseMLP
from workerkit.components.model.decoder import Decoder
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.model import ModelConfig


class Mixtral(Decoder):
    """A router and experts in every layer."""

    room = "block_sparse_moe"
    expert_names = ("w1", "w3", "w2")  # gate, up, down

    def make_mlp(self, number: int) -> GatedMLP | SparseMLP | None:
        moe = self.config.moe
        assert moe is not None, "the loader reads it for this architecture"
        if number not in moe.sparse_layers:
            return None
        return make_sparse_mlp(self.config, self.room, self.expert_names, self.kernels, self.dtype, self.device)


class Qwen3Moe(Mixtral):
    """Likewise, but for the layers that the config leaves out."""

    room = "mlp"
    expert_names = ("gate_proj", "up_proj", "down_proj")


def make_sparse_mlp(
    config: ModelConfig,
    room: str,
    names: tuple[str, str, str],
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    shared_name: str = "shared_experts",
    shared_gate: str | None = None,
) -> SparseMLP:
    """By the config's numbers. room: where it is below a layer in a checkpoint; names: of an expert's gate, up and
    down; shared_name: of what every token goes through, if there is such, in that room; shared_gate: see SparseMLP."""
    moe = config.moe
    assert moe is not None, "the loader reads it for this architecture"
    shared = None
    if moe.shared_intermediate_size:
        size, place = moe.shared_intermediate_size, f"{room}.{shared_name}"
        shared = GatedMLP(config.hidden_size, size, False, kernels, dtype, device, config.hidden_act, place)
    experts = ExpertWeights(moe, config.hidden_size, names, kernels, dtype, device)
    return SparseMLP(experts, room, shared, None if shared is None else shared_gate)
