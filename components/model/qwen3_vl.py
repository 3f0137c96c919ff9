"""Decoders that see pictures: a text model beside a vision tower."""

from __future__ import annotations

import torch

from workerkit.components.layers.weights import Destination
from workerkit.components.model.decoder import Decoder
from workerkit.components.model.qwen3_next import Qwen3_5, Qwen3_5Moe
from workerkit.components.model.vision import Qwen3VisionTower
from workerkit.framework.errors import ModelError
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.lora import AdaptedLinear
from workerkit.framework.interfaces.model import ModelConfig
from workerkit.framework.interfaces.vision import VisionTower

TOWER = "model.visual."
TEXT = "model.language_model."  # the text model's part of a checkpoint, `model.` everywhere else


class VisionLanguage(Decoder):
    """The tower of Qwen3-VL beside a text model, which is another base behind this one. Texts without pictures take
    plain positions."""

    def __init__(self, config: ModelConfig, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        if config.vision is None:
            raise ModelError(f"{config.architecture}: there is no vision_config")
        super().__init__(config, kernels, dtype, device)
        self.visual = Qwen3VisionTower(config.vision, kernels, dtype, device)

    @property
    def vision(self) -> VisionTower | None:
        return self.visual

    def linears(self) -> dict[str, tuple[AdaptedLinear, str]]:
        """Those of the text: adapters go by the tokens of a step, a tower's rows are patches."""
        return {name: place for name, place in super().linears().items() if not name.startswith(TOWER)}

    def required_tensors(self) -> dict[str, Destination]:
        tower = {TOWER + name: place for name, place in self.visual.destinations().items()}
        return super().required_tensors() | tower

    def canonical_name(self, name: str) -> str | None:
        if name.startswith(TOWER):
            return name
        return super().canonical_name("model." + name.removeprefix(TEXT) if name.startswith(TEXT) else name)


class Qwen3VL(VisionLanguage):
    """Qwen3 with pictures."""


class Qwen3_5VL(VisionLanguage, Qwen3_5):
    """Qwen3.5 with pictures."""


class Qwen3_5MoeVL(VisionLanguage, Qwen3_5Moe):
    """Likewise, with experts."""
