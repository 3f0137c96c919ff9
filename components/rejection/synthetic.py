"""Given acceptance rates, for benchmarks of what surrounds a proposer: the output is NOT the target's."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import attrs
import torch

from workerkit.components.rejection.rows import VerifyRows, leading
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling import RandomStream, Sampler, SamplerOutput
from workerkit.framework.interfaces.speculation import RejectionSampler


def _falling(instance: object, attribute: attrs.Attribute[Any], value: tuple[float, ...]) -> None:
    if not all(0 <= after <= before for before, after in pairwise((1.0, *value))):
        raise ValueError(f"'{attribute.name}' must be in 0..1, and none above the one before it: {value}")


@attrs.frozen(kw_only=True)
class SyntheticRejectionConfig:
    """Options of `synthetic`."""

    rates: tuple[float, ...] = attrs.field(
        validator=_falling,
        metadata={"doc": "in what share of the steps draft 1, 2 … is accepted, falling; those behind never are"},
    )


class SyntheticRejection(RejectionSampler):
    """Draft i is accepted with probability r_i / r_(i-1) if the one before it was, whatever it says. The token behind
    those is the target's own."""

    def __init__(
        self, config: SyntheticRejectionConfig, shape: WorkerShape, context: DeviceContext, kernels: Kernels
    ) -> None:
        given = (1.0, *config.rates, *[0.0] * shape.num_speculative_tokens)
        chances = [after / before if before else 0.0 for before, after in pairwise(given)]
        self._chances = torch.tensor(chances[: shape.num_speculative_tokens], dtype=torch.float64).to(context.device)
        self._kernels = kernels

    def verify(self, logits: torch.Tensor, batch: InputBatch, sampler: Sampler) -> SamplerOutput:
        rows = VerifyRows.of(batch)
        drawn = sampler.draw(logits, batch)[rows.index]
        positions = rows.positions[:, :-1]
        seeds = sampler.keys(batch).seeds[:, None].expand_as(positions)
        uniform = self._kernels.uniform_from_seed(seeds.flatten(), positions.flatten(), RandomStream.ACCEPTANCE)
        likely = uniform.view_as(positions) < self._chances[: positions.shape[1]]
        accepted = leading(likely & (rows.drafts >= 0) & (drawn[:, :-1] >= 0))
        return rows.output(accepted, drawn.gather(1, accepted[:, None])[:, 0])
