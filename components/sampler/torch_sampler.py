"""The sampler: registered stages in order, then one token a row.

Randomness depends on the request's seed and the position only, so a request draws the same tokens alone, in any batch,
in any order, after a preemption and on either runner.
"""

from __future__ import annotations

import attrs
import numpy as np
import torch
from attrs import validators

from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.request import NewRequest
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling import Sampler, SamplerStage, SamplingContext

SAMPLING_STREAM = 0  # `stream` of uniform_from_seed; other uses of randomness take other numbers


@attrs.frozen(kw_only=True)
class TorchSamplerConfig:
    """What a request gets that leaves a parameter unset."""

    temperature: float = attrs.field(default=1.0, validator=validators.ge(0.0), metadata={"doc": "0 is greedy"})
    top_k: int = attrs.field(default=0, validator=validators.ge(0), metadata={"doc": "0 is off"})
    top_p: float = attrs.field(
        default=1.0, validator=[validators.gt(0.0), validators.le(1.0)], metadata={"doc": "1 is off"}
    )


class TorchSampler(Sampler):
    """Stages, then argmax for greedy rows and inverse-CDF sampling for the others."""

    def __init__(
        self,
        config: TorchSamplerConfig,
        shape: WorkerShape,
        context: DeviceContext,
        kernels: Kernels,
        stages: tuple[SamplerStage, ...],
    ) -> None:
        self._config = config
        self._kernels = kernels
        self._stages = stages
        self._seeds = torch.zeros(shape.max_num_reqs, dtype=torch.int64, device=context.device)
        self._is_random = torch.zeros(shape.max_num_reqs, dtype=torch.bool, device=context.device)
        self._is_random_np = np.zeros(shape.max_num_reqs, dtype=bool)
        self._entropy = np.random.default_rng()

    def add(self, slot: int, request: NewRequest) -> None:
        params = self._resolve(request)
        self._seeds[slot] = int(self._entropy.integers(2**63)) if params.sampling.seed is None else params.sampling.seed
        self._set_random(slot, params.sampling.temperature != 0)
        for stage in self._stages:
            stage.add(slot, params)

    def clear(self, slot: int) -> None:
        self._set_random(slot, False)
        for stage in self._stages:
            stage.clear(slot)

    def _set_random(self, slot: int, is_random: bool) -> None:
        self._is_random[slot] = is_random
        self._is_random_np[slot] = is_random

    def _resolve(self, request: NewRequest) -> NewRequest:
        given = request.sampling
        unset = {name: value for name, value in attrs.asdict(self._config).items() if getattr(given, name) is None}
        return attrs.evolve(request, sampling=attrs.evolve(given, **unset)) if unset else request

    def process(self, logits: torch.Tensor, batch: InputBatch) -> torch.Tensor:
        context = SamplingContext(
            slots=batch.idx_mapping[batch.logits_rows],
            positions=batch.positions[batch.logits_indices],
            host_slots=batch.plan.slots,
        )
        for stage in self._stages:
            logits = stage.apply(logits, context)
        return logits

    def draw(self, logits: torch.Tensor, batch: InputBatch) -> torch.Tensor:
        greedy = logits.argmax(dim=-1)
        if not self._is_random_np[batch.plan.slots].any():
            return greedy
        slots = batch.idx_mapping[batch.logits_rows]
        positions = batch.positions[batch.logits_indices]
        uniform = self._kernels.uniform_from_seed(self._seeds[slots], positions, SAMPLING_STREAM)
        sampled = self._kernels.sample_from_probs(logits.softmax(dim=-1), uniform)
        return torch.where(self._is_random[slots], sampled, greedy)
