"""Qwen3-Next and Qwen3.5: layers of Gated DeltaNet, and gated attention between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from workerkit.components.layers.gated_attention import GatedAttention
from workerkit.components.layers.gated_delta import GatedDeltaNet
from workerkit.components.layers.mixer import Mixer
from workerkit.components.layers.mlp import GatedMLP
from workerkit.components.layers.moe import SparseMLP
from workerkit.components.layers.weights import Weight
from workerkit.components.model.decoder import Decoder
from workerkit.components.model.moe import Qwen3Moe, make_sparse_mlp
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import AttentionLayer
from workerkit.framework.interfaces.model import ModelConfig

_TEXT = "model.language_model."  # the text model's part of a checkpoint with a vision tower,
_TOWER = "model.visual."  # which text alone has no use for


class Qwen3_5(Decoder):
    """With gated MLPs."""

    is_interleaved = False  # see GatedDeltaNet

    def make_mixer(self, number: int, layer: AttentionLayer | None) -> Mixer:
        config = self.config
        if layer is not None:
            return GatedAttention(config, layer, self.kernels, self.dtype, self.device)
        assert config.gated_delta is not None, "the loader reads it for this architecture"
        return GatedDeltaNet(
            config.gated_delta,
            config.hidden_size,
            config.rms_norm_eps,
            f"model.layers.{number}.linear_attn",
            config.recurrent_layers.index(number),
            self.kernels,
            self.dtype,
            self.device,
            is_interleaved=self.is_interleaved,
        )

    def canonical_name(self, name: str) -> str | None:
        if name.startswith(_TOWER) and self.vision is None:
            return None
        return super().canonical_name("model." + name.removeprefix(_TEXT) if name.startswith(_TEXT) else name)


class Qwen3_5Moe(Qwen3_5, Qwen3Moe):
    """With experts, and one that all tokens share."""

    def make_mlp(self, number: int) -> GatedMLP | SparseMLP | None:
        moe = self.config.moe
        assert moe is not None, "the loader reads it for this architecture"
        if number not in moe.sparse_layers:
            return None
        return make_qwen_experts(self.config, self.kernels, self.dtype, self.device)

    def load_weights(self, weights: Iterable[tuple[str, Weight]]) -> None:
        super().load_weights(one_by_one(weights))


class Qwen3Next(Qwen3_5Moe):
    """The same with other names."""

    is_interleaved = True


def make_qwen_experts(config: ModelConfig, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> SparseMLP:
    """Experts with the names of Qwen's families."""
    room, names = Qwen3Moe.room, Qwen3Moe.expert_names
    return make_sparse_mlp(config, room, names, kernels, dtype, device, "shared_expert", "shared_expert_gate")


def one_by_one(weights: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
    """With the experts that Qwen3.5's checkpoints hold stacked, gate_up_proj [E, 2 I, H] and down_proj [E, H, I], under
    the names that single ones have."""
    for name, stacked in weights:
        room, _, kind = name.rpartition(".experts.")
        if kind not in ("gate_up_proj", "down_proj") or not isinstance(stacked, torch.Tensor):
            yield name, stacked
            continue
        for number, weight in enumerate(stacked):
            ends = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for end, part in zip(ends, torch.chunk(weight, len(ends)), strict=True):
                yield f"{room}.experts.{number}.{end}.weight", part
