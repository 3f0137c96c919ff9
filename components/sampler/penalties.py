"""The sampler stage of presence, frequency and repetition penalties."""

from __future__ import annotations

from typing import ClassVar

import torch

from workerkit.components.sampler.tables import to_device
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.request import NewRequest
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling import SamplerStage, SamplingContext
from workerkit.framework.interfaces.sampling_params import SamplingParams


class Penalties(SamplerStage):
    """Repetition counts prompt and output, presence and frequency the output alone; drafts are output."""

    parameters: ClassVar[tuple[str, ...]] = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    reads_text: ClassVar[bool] = True

    def __init__(self, shape: WorkerShape, context: DeviceContext, kernels: Kernels) -> None:
        self._kernels = kernels
        self._penalties = torch.zeros(shape.max_num_reqs, 3, device=context.device)  # in the order of `parameters`

    def applies_to(self, params: SamplingParams) -> bool:
        return (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0.0, 0.0, 1.0)

    def add(self, slot: int, request: NewRequest) -> None:
        values = [getattr(request.sampling, name) for name in self.parameters]
        self._penalties[slot] = to_device(values, torch.float32, self._penalties.device)

    def apply(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        penalties = self._penalties[context.slots].unbind(1)
        return self._kernels.apply_penalties(logits, context.text(), context.prompt_lens, *penalties)
