"""As many drafts as bring the most tokens per second: what they are expected to yield over what verifying costs."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np
import torch
from attrs import validators

from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.speculation import Drafts, VerifyBudget

_REPEATS = 2


@attrs.frozen(kw_only=True)
class ConfidenceBudgetConfig:
    """Options of `confidence`."""

    min_survival: float = attrs.field(
        default=0.0,
        validator=[validators.ge(0.0), validators.le(1.0)],
        metadata={"doc": "drafts that are less likely to be accepted, with all before them, are never verified"},
    )


class ConfidenceBudget(VerifyBudget):
    """Of all requests' drafts, the likeliest: so many that (requests + expected accepted drafts) / (time of a step of
    so many tokens) is largest.

    A draft survives with the product of the confidences up to it. Times are measured when the worker warms up, of steps
    of 1, 2, 4 ... tokens, and interpolated; how long the contexts are is left out of account. Drafts without confidence
    stay as they are.
    """

    def __init__(self, config: ConfidenceBudgetConfig, shape: WorkerShape, context: DeviceContext) -> None:
        self._min_survival = config.min_survival
        self._max_num_reqs = shape.max_num_reqs
        self._max_tokens = shape.max_num_batched_tokens
        most = shape.max_num_reqs * (shape.num_speculative_tokens + 1)
        self._measured = min(most, shape.max_num_batched_tokens)
        # Before anything is measured a step costs the same, whatever its size, and one beyond the limit does not exist.
        costs = np.where(np.arange(most + 1) <= shape.max_num_batched_tokens, 1.0, np.inf)
        self._costs = torch.from_numpy(costs).to(context.device)  # [most + 1] float64, seconds by number of tokens

    def calibrate(self, seconds: Callable[[int, int], float]) -> None:
        sizes = [2**power for power in range(self._measured.bit_length()) if 2**power < self._measured]
        sizes.append(self._measured)
        times = [self._measure(seconds, size) for size in sizes]
        # A larger step that was measured to be faster is noise.
        costs = np.interp(np.arange(self._measured + 1), sizes, np.maximum.accumulate(times))
        self._costs[: self._measured + 1] = torch.from_numpy(costs).to(self._costs.device)

    def _measure(self, seconds: Callable[[int, int], float], num_tokens: int) -> float:
        num_reqs = min(num_tokens, self._max_num_reqs)  # as many logits rows as there may be: each draft has one
        seconds(num_tokens, num_reqs)  # the first one of a size may prepare something
        return min(seconds(num_tokens, num_reqs) for _ in range(_REPEATS))

    def trim(self, drafts: Drafts, batch: InputBatch) -> Drafts:
        if drafts.confidence is None:
            return drafts
        decoding = ~batch.plan.is_partial
        num_reqs, token_ids = int(decoding.sum()), drafts.token_ids
        verified = torch.from_numpy(decoding).to(token_ids.device, non_blocking=True)[:, None] & (token_ids >= 0)
        confidence = drafts.confidence.double().nan_to_num(nan=0.0).clamp(0.0, 1.0)
        survival = torch.where(verified, confidence, 0.0).cumprod(dim=1)
        survival = torch.where(survival >= self._min_survival, survival, 0.0)
        # Stable: of a request's drafts that are equally likely the first one comes first.
        gains, order = survival.flatten().sort(descending=True, stable=True)
        expected = torch.cat([gains.new_zeros(1), gains.cumsum(0)]) + num_reqs
        rates = expected / self._costs[num_reqs : num_reqs + len(expected)]
        ranks = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        keep = (ranks < rates.argmax()).view_as(token_ids) & (survival > 0)
        return attrs.evolve(drafts, token_ids=token_ids.masked_fill(~keep, -1))
