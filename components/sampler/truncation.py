"""Sampler stages that shape a distribution: temperature, top-n-sigma, min-p, top-k with top-p, typical-p.

None of them is used by a greedy request: its most likely token stays what it is.
"""

from __future__ import annotations

import abc
from typing import ClassVar

import numpy as np
import torch

from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.request import NewRequest
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling import SamplerStage, SamplingContext
from workerkit.framework.interfaces.sampling_params import SamplingParams


class _OneNumber(SamplerStage):
    """A stage of one parameter, kept by slot in float32."""

    parameter: ClassVar[str]
    off: ClassVar[float]  # the value with which the stage would change nothing

    def __init__(self, shape: WorkerShape, context: DeviceContext, kernels: Kernels) -> None:
        self._kernels = kernels
        self._values = torch.zeros(shape.max_num_reqs, dtype=torch.float32, device=context.device)

    def applies_to(self, params: SamplingParams) -> bool:
        return params.temperature != 0 and getattr(params, self.parameter) != self.off

    def add(self, slot: int, request: NewRequest) -> None:
        self._values[slot] = getattr(request.sampling, self.parameter)

    def apply(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        return self._shape(logits, self._values[context.slots])

    @abc.abstractmethod
    def _shape(self, logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[N, V], each row's parameter [N] -> [N, V]."""


class Temperature(_OneNumber):
    """logits / temperature."""

    parameters: ClassVar[tuple[str, ...]] = ("temperature",)
    parameter, off = "temperature", 1.0

    def _shape(self, logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return logits.div_(values[:, None])


class TopNSigma(_OneNumber):
    """Keeps logits within n standard deviations of the largest; see `ApplyTopNSigma`."""

    parameters: ClassVar[tuple[str, ...]] = ("top_n_sigma",)
    parameter, off = "top_n_sigma", 0.0

    def _shape(self, logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return self._kernels.apply_top_n_sigma(logits, values)


class MinP(_OneNumber):
    """Keeps tokens with at least min_p of the largest probability."""

    parameters: ClassVar[tuple[str, ...]] = ("min_p",)
    parameter, off = "min_p", 0.0

    def _shape(self, logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return self._kernels.apply_min_p(logits, values)


class TypicalP(_OneNumber):
    """Keeps tokens whose surprise is closest to the entropy; see `ApplyTypicalP`."""

    parameters: ClassVar[tuple[str, ...]] = ("typical_p",)
    parameter, off = "typical_p", 1.0

    def _shape(self, logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return self._kernels.apply_typical_p(logits, values)


class TopKTopP(SamplerStage):
    """Keeps the top k, then of those, renormalised, the top p; see `ApplyTopKTopP` for ties."""

    parameters: ClassVar[tuple[str, ...]] = ("top_k", "top_p")

    def __init__(self, shape: WorkerShape, context: DeviceContext, kernels: Kernels) -> None:
        self._kernels = kernels
        self._truncating = range(1, shape.vocab_size)  # values of top_k
        self._top_k = torch.zeros(shape.max_num_reqs, dtype=torch.int64, device=context.device)
        self._top_p = torch.ones(shape.max_num_reqs, dtype=torch.float32, device=context.device)
        self._uses_k = np.zeros(shape.max_num_reqs, dtype=bool)
        self._uses_p = np.zeros(shape.max_num_reqs, dtype=bool)

    def applies_to(self, params: SamplingParams) -> bool:
        return params.temperature != 0 and (params.top_k in self._truncating or params.top_p != 1.0)

    def add(self, slot: int, request: NewRequest) -> None:
        params = request.sampling
        top_k, top_p = params.top_k or 0, params.top_p or 1.0
        self._uses_k[slot], self._uses_p[slot] = top_k in self._truncating, top_p != 1.0
        self._top_k[slot] = top_k if top_k in self._truncating else 0
        self._top_p[slot] = top_p

    def apply(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        k = self._top_k[context.slots] if self._uses_k[context.host_slots].any() else None
        p = self._top_p[context.slots] if self._uses_p[context.host_slots].any() else None
        return self._kernels.apply_top_k_top_p_npu(logits, k, p)
