"""DeepSeek-V3: latent attention, dense layers first, experts with shared ones in all others."""

from __future__ import annotations

import torch

from workerkit.components.layers.mixer import Mixer
from workerkit.components.layers.mla import LatentAttention
from workerkit.components.model.moe import Qwen3Moe
from workerkit.framework.errors import ModelError
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.kv_cache import AttentionLayer
from workerkit.framework.interfaces.model import ModelConfig

MODEL_TYPE = "deepseek_v3"


class DeepseekV3(Qwen3Moe):
    """Layers behind the last one, which some checkpoints have for drafting, are of no use here.

    Raises ModelError when the config has no numbers of latent attention, or none of experts.
    """

    def __init__(self, config: ModelConfig, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        check_family(config)
        super().__init__(config, kernels, dtype, device)
        first = config.num_hidden_layers
        numbers = range(first, first + config.num_nextn_predict_layers)
        self._drafting = tuple(f"model.layers.{number}." for number in numbers)

    def make_mixer(self, number: int, layer: AttentionLayer | None) -> Mixer:
        assert layer is not None, "all layers have attention"
        return LatentAttention(self.config, layer, self.kernels, self.dtype, self.device)

    def canonical_name(self, name: str) -> str | None:
        return None if name.startswith(self._drafting) else super().canonical_name(name)


def check_family(config: ModelConfig) -> None:
    """Raise ModelError where the config is not one of this family, whatever its architecture is called."""
    if config.mla is None or config.moe is None:
        raise ModelError(
            f"{config.architecture} needs the numbers of latent attention and experts: a config.json whose model_type "
            f"is {MODEL_TYPE!r}"
        )
