"""Sampler stages: temperature, and top-k with top-p. State lives by slot, with a mirror on the host."""

from __future__ import annotations

import numpy as np
import torch

from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.request import NewRequest
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling import SamplerStage, SamplingContext


class Temperature(SamplerStage):
    """logits / temperature; 0 (greedy) and 1 leave a row as it is."""

    def __init__(self, shape: WorkerShape, context: DeviceContext) -> None:
        self._divisor = torch.ones(shape.max_num_reqs, dtype=torch.float32, device=context.device)
        self._used = np.zeros(shape.max_num_reqs, dtype=bool)

    def add(self, slot: int, request: NewRequest) -> None:
        temperature = request.sampling.temperature or 1.0
        self._used[slot] = temperature != 1.0
        self._divisor[slot] = temperature

    def clear(self, slot: int) -> None:
        self._used[slot] = False
        self._divisor[slot] = 1.0

    def apply(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        if not self._used[context.host_slots].any():
            return logits
        return logits.div_(self._divisor[context.slots].unsqueeze(1))


class TopKTopP(SamplerStage):
    """Keeps the top k, then of those the top p; see `ApplyTopKTopP` for ties. Greedy rows keep their argmax anyway."""

    def __init__(self, shape: WorkerShape, context: DeviceContext, kernels: Kernels) -> None:
        self._kernels = kernels
        self._top_k = torch.zeros(shape.max_num_reqs, dtype=torch.int64, device=context.device)
        self._top_p = torch.ones(shape.max_num_reqs, dtype=torch.float32, device=context.device)
        self._uses_k = np.zeros(shape.max_num_reqs, dtype=bool)
        self._uses_p = np.zeros(shape.max_num_reqs, dtype=bool)
        self._vocab_size = shape.vocab_size

    def add(self, slot: int, request: NewRequest) -> None:
        params = request.sampling
        greedy = params.temperature == 0
        top_k = 0 if greedy else min(params.top_k or 0, self._vocab_size)
        top_p = 1.0 if greedy or params.top_p is None else params.top_p
        self._write(slot, top_k, top_p)

    def clear(self, slot: int) -> None:
        self._write(slot, 0, 1.0)

    def _write(self, slot: int, top_k: int, top_p: float) -> None:
        self._uses_k[slot] = 0 < top_k < self._vocab_size
        self._uses_p[slot] = top_p < 1.0
        self._top_k[slot] = top_k
        self._top_p[slot] = top_p

    def apply(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        k = self._top_k[context.slots] if self._uses_k[context.host_slots].any() else None
        p = self._top_p[context.slots] if self._uses_p[context.host_slots].any() else None
        return logits if k is None and p is None else self._kernels.apply_top_k_top_p(logits, k, p)
