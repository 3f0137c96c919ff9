"""The sampler stage `ban_token`."""

from __future__ import annotations

import attrs
import torch
from attrs import validators

from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling import SamplerStage, SamplingContext


@attrs.frozen(kw_only=True)
class BanTokenConfig:
    """Options of `ban_token`."""

    token_ids: tuple[int, ...] = attrs.field(
        validator=[validators.min_len(1), validators.deep_iterable(validators.ge(0))],
        metadata={"doc": "tokens that no request may be given"},
    )


class BanToken(SamplerStage):
    """Sets the logits of some tokens to -inf, for every request."""

    def __init__(self, config: BanTokenConfig, shape: WorkerShape, context: DeviceContext) -> None:
        if (largest := max(config.token_ids)) >= shape.vocab_size:
            raise UnsupportedError(f"token_ids: {largest} is outside the model's vocabulary of {shape.vocab_size}")
        if len(set(config.token_ids)) == shape.vocab_size:
            raise UnsupportedError("token_ids: every token of the vocabulary is banned")
        self._columns = torch.tensor(sorted(set(config.token_ids)), dtype=torch.int64, device=context.device)

    def apply(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        return logits.index_fill_(1, self._columns, float("-inf"))
