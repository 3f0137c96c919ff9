"""Architecture names of Hugging Face's config.json, and the network that each one is."""

from __future__ import annotations

from collections.abc import Callable

import torch

from workerkit.components.model.decoder import Decoder
from workerkit.framework.errors import ModelError, did_you_mean
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.model import ModelConfig, ModelLibrary, Network

Builder = Callable[[ModelConfig, Kernels, torch.dtype, torch.device], Network]


class NativeLibrary(ModelLibrary):
    """The networks of this folder."""

    builders: dict[str, Builder] = {  # noqa: RUF012 - read only; a subclass extends it with its own
        "LlamaForCausalLM": Decoder,
        "MistralForCausalLM": Decoder,
        "Qwen2ForCausalLM": Decoder,
        "Qwen3ForCausalLM": Decoder,
    }

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(self.builders)

    def build(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Network:
        builder = self.builders.get(config.architecture)
        if builder is None:
            raise ModelError(
                f"architecture {config.architecture!r} is not known; {did_you_mean(config.architecture, self.builders)}"
            )
        return builder(config, self._kernels, dtype, device)
