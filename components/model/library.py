"""Architecture names of Hugging Face's config.json, and the network that each one is."""

from __future__ import annotations

from collections.abc import Callable

import torch

from workerkit.components.model.bamba import Bamba
from workerkit.components.model.decoder import Decoder
from workerkit.components.model.deepseek import DeepseekV3
from workerkit.components.model.drafts.block import DFlashDraftModel, DSparkDraftModel
from workerkit.components.model.drafts.deepseek_mtp import DeepseekMTP
from workerkit.components.model.drafts.eagle import Eagle, Eagle3
from workerkit.components.model.drafts.medusa import Medusa
from workerkit.components.model.drafts.mtp import MTP
from workerkit.components.model.gpt_oss import GptOss
from workerkit.components.model.moe import Mixtral, Qwen3Moe
from workerkit.components.model.qwen3_next import Qwen3_5, Qwen3_5Moe, Qwen3Next
from workerkit.components.model.qwen3_vl import Qwen3_5MoeVL, Qwen3_5VL, Qwen3VL
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
        "Gemma2ForCausalLM": Decoder,
        "Gemma3ForCausalLM": Decoder,
        "MixtralForCausalLM": Mixtral,
        "BambaForCausalLM": Bamba,
        "Qwen3NextForCausalLM": Qwen3Next,
        "Qwen3_5ForCausalLM": Qwen3_5,
        "Qwen3_5MoeForCausalLM": Qwen3_5Moe,
        "Qwen3MoeForCausalLM": Qwen3Moe,
        "GptOssForCausalLM": GptOss,
        "DeepseekV3ForCausalLM": DeepseekV3,
        "Qwen3VLForConditionalGeneration": Qwen3VL,
        "Qwen3_5ForConditionalGeneration": Qwen3_5VL,
        "Qwen3_5MoeForConditionalGeneration": Qwen3_5MoeVL,
        # Drafts, by the names of their authors, of vLLM and of speculators.
        "EagleLlamaForCausalLM": Eagle,
        "EagleSpeculator": Eagle,
        "LlamaForCausalLMEagle3": Eagle3,
        "Eagle3LlamaForCausalLM": Eagle3,
        "Eagle3DraftModel": Eagle3,
        "Eagle3Speculator": Eagle3,
        "Qwen3NextMTP": MTP,
        "Qwen3_5MTP": MTP,
        "DeepSeekMTPModel": DeepseekMTP,
        "DeepseekV3MTP": DeepseekMTP,
        "MTPDraftModel": MTP,
        "MTPSpeculator": MTP,
        "MedusaModel": Medusa,
        "DFlashDraftModel": DFlashDraftModel,
        "DFlashQwen3ForCausalLM": DFlashDraftModel,
        "DSparkDraftModel": DSparkDraftModel,
        "Qwen3DSparkModel": DSparkDraftModel,
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
