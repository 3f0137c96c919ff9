"""The layer behind DeepSeek-V3's last one: a decoder layer of its kind behind fused inputs, as in `mtp`, other names.

h_p is the target's state after its last norm, and what goes on as h_{p+1} is the layer's state after
`shared_head.norm`: as in transformers' `MtpModel` and vLLM. Embeddings and head, which the checkpoint has once more,
are used from there.
"""

from __future__ import annotations

import torch

from workerkit.components.layers.mla import LatentAttention
from workerkit.components.model.decoder import DecoderLayer
from workerkit.components.model.deepseek import DeepseekV3, check_family
from workerkit.components.model.drafts.mtp import MTP
from workerkit.components.model.moe import make_sparse_mlp
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import AttentionLayer
from workerkit.framework.interfaces.model import ModelConfig


class DeepseekMTP(MTP):
    """Layer `num_hidden_layers` of the target's own checkpoint, always one with experts."""

    names = {  # noqa: RUF012 - read only
        "enorm.": "pre_fc_norm_embedding.",
        "hnorm.": "pre_fc_norm_hidden.",
        "eh_proj.": "fc.",
        "shared_head.norm.": "norm.",
        "shared_head.head.": "lm_head.",
        "embed_tokens.": "embed_tokens.",
    }

    def __init__(self, config: ModelConfig, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        check_family(config)
        super().__init__(config, kernels, dtype, device)
        self.room = f"layers.{config.num_hidden_layers}."

    def make_layer(self, config: ModelConfig, layer: AttentionLayer) -> DecoderLayer:
        kernels, dtype, device = self.kernels, self.dtype, self.device
        mixer = LatentAttention(config, layer, kernels, dtype, device)
        mlp = make_sparse_mlp(config, DeepseekV3.room, DeepseekV3.expert_names, kernels, dtype, device)
        return DecoderLayer(config, mixer, kernels, dtype, device, mlp=mlp)
