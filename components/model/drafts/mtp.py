"""Multi-token prediction heads with the names of Qwen3-Next and Qwen3.5: one decoder layer behind fused inputs.

z_p = fc[pre_fc_norm_embedding(e(x_{p+1})); pre_fc_norm_hidden(h_p)], h_p being the target's hidden state after its last
norm; norm(layer(z_p)) gives logits of token p + 2, and goes on as h_{p+1}. As in vLLM's `qwen3_next_mtp`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs
import torch

from workerkit.components.layers.attention import Attention
from workerkit.components.layers.gated_attention import GatedAttention
from workerkit.components.layers.linear import Linear
from workerkit.components.layers.mixer import LayerContext
from workerkit.components.layers.norm import RMSNorm
from workerkit.components.layers.rope import RotaryEmbedding
from workerkit.components.layers.weights import Destination, Weight
from workerkit.components.model.decoder import DecoderLayer, check_numbers, make_attention_layers
from workerkit.components.model.drafts.eagle import layer_tensors
from workerkit.components.model.drafts.head import DraftModule, integer
from workerkit.components.model.qwen3_next import make_qwen_experts, one_by_one
from workerkit.framework.errors import ModelError
from workerkit.framework.interfaces.draft import HiddenDraft
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import AttentionLayer
from workerkit.framework.interfaces.model import Attend, ModelConfig

_COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
_GATED = ("qwen3_next", "qwen3_5")  # families with gated attention, whose norms multiply by 1 + weight
_SPECULATORS = {
    "input_proj.": "fc.",
    "hidden_layernorm.": "pre_fc_norm_hidden.",
    "token_layernorm.": "pre_fc_norm_embedding.",
    "final_layernorm.": "norm.",
}


class MTP(DraftModule, HiddenDraft):
    """The layer is the plain decoder's, or one with attention of the families named above, with experts if the config
    has such. Its tensors may lie in the target's own checkpoint, which is ignored else."""

    prefix = "mtp."
    room = "mtp_layers.0."  # where other checkpoints have everything,
    names: Mapping[str, str] = _SPECULATORS  # and what is not the layer's by these names

    def __init__(self, config: ModelConfig, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        kind = str(config.raw.get("model_type") or "")
        self.is_gated = config.architecture in ("Qwen3NextMTP", "Qwen3_5MTP") or kind.startswith(_GATED)
        # num_hidden_layers and layer types are the target's
        config = attrs.evolve(config, num_hidden_layers=1, sliding_windows=(), recurrent_layers=())
        if self.is_gated:
            config = attrs.evolve(config, qk_norm=True, norm_offset=1.0)
        super().__init__(config, kernels, dtype, device)
        check_numbers(config)
        for name in _COUNTS:
            if integer(config, name, 1) != 1:
                raise ModelError(f"{config.architecture}: {name} {config.raw[name]} is not supported, only 1")
        self._attention_layers = make_attention_layers(config, self.prefix)
        hidden, eps, offset = config.hidden_size, config.rms_norm_eps, config.norm_offset
        self.pre_fc_norm_embedding = RMSNorm(hidden, eps, kernels, dtype, device, offset)
        self.pre_fc_norm_hidden = RMSNorm(hidden, eps, kernels, dtype, device, offset)
        self.fc = Linear("fc", 2 * hidden, hidden, False, kernels, dtype, device)
        self.layers = torch.nn.ModuleList(self.make_layer(config, layer) for layer in self._attention_layers)
        self.norm = RMSNorm(hidden, eps, kernels, dtype, device, offset)
        self.rotary = RotaryEmbedding(config.rope, kernels, dtype, device)

    def make_layer(self, config: ModelConfig, layer: AttentionLayer) -> DecoderLayer:
        """The decoder layer; `config` has it alone."""
        kernels, dtype, device = self.kernels, self.dtype, self.device
        attention = GatedAttention if self.is_gated else Attention
        mlp = None if config.moe is None else make_qwen_experts(config, kernels, dtype, device)
        return DecoderLayer(config, attention(config, layer, kernels, dtype, device), kernels, dtype, device, mlp=mlp)

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return self._attention_layers

    @property
    def features(self) -> Sequence[str]:
        return ()

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def step(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        rope_lens: torch.Tensor,
        attend: Attend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        fused = self.fc(torch.cat((self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)), dim=-1))
        cos, sin = self.rotary(positions, rope_lens)
        context = LayerContext(cos=cos, sin=sin, attend=attend)
        x, residual = self.layers[0](None, fused, context)
        state, _ = self.norm.add(x, residual)
        return state, state

    def required_tensors(self) -> dict[str, Destination]:
        own = {
            "pre_fc_norm_embedding.weight": self.pre_fc_norm_embedding.destination(),
            "pre_fc_norm_hidden.weight": self.pre_fc_norm_hidden.destination(),
            "norm.weight": self.norm.destination(),
        }
        own |= self.fc.destinations() | layer_tensors(self.layers)
        return super().required_tensors() | {self.prefix + name: place for name, place in own.items()}

    def load_weights(self, weights: Iterable[tuple[str, Weight]]) -> None:
        super().load_weights(one_by_one(weights))

    def canonical_name(self, name: str) -> str | None:
        name = name.removeprefix("model.")
        if name.startswith(self.room):
            name = name.removeprefix(self.room)
            for theirs, ours in self.names.items():
                if name.startswith(theirs):
                    return self.prefix + ours + name.removeprefix(theirs)
            return super().canonical_name(f"{self.prefix}layers.0.{name}")
        return super().canonical_name(name) if name.startswith(self.prefix) else None
