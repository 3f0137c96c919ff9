"""The sampler stage `ban_token`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs
import torch
from attrs import validators

from workerkit.framework.errors import RequestError, UnsupportedError
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.request import NewRequest
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling import SamplerStage, SamplingContext
from workerkit.framework.interfaces.sampling_params import SamplingParams


@attrs.frozen(kw_only=True)
class BanTokenConfig:
    """Options of `ban_token`."""

    token_ids: tuple[int, ...] = attrs.field(
        default=(),
        validator=validators.deep_iterable(validators.ge(0)),
        metadata={"doc": "tokens that no request may be given"},
    )


class BanToken(SamplerStage):
    """Sets the logits of some tokens to -inf: the config's for every request, and `extra_args["ban_token"]`, a list of
    token ids, for the request that brings it."""

    parameters: ClassVar[tuple[str, ...]] = ("ban_token",)  # requests with keys that no stage declares are refused

    def __init__(self, config: BanTokenConfig, shape: WorkerShape, context: DeviceContext) -> None:
        if (largest := max(config.token_ids, default=0)) >= shape.vocab_size:
            raise UnsupportedError(f"token_ids: {largest} is outside the model's vocabulary of {shape.vocab_size}")
        if len(set(config.token_ids)) == shape.vocab_size:
            raise UnsupportedError("token_ids: every token of the vocabulary is banned")
        self._vocab_size = shape.vocab_size
        self._device = context.device
        self._everyones = self._columns(config.token_ids)
        self._own: dict[int, torch.Tensor] = {}  # by slot

    def applies_to(self, params: SamplingParams) -> bool:
        """Called on the host before a request is admitted, so wrong parameters are refused here."""
        own = params.extra_args.get("ban_token", ())
        if not isinstance(own, list | tuple) or not all(isinstance(token, int) for token in own):
            raise RequestError(f"extra_args: ban_token is {own!r}; right: a list of token ids")
        if wrong := [token for token in own if not 0 <= token < self._vocab_size]:
            raise RequestError(f"extra_args: ban_token has {wrong[0]}; right: 0 to {self._vocab_size - 1}")
        return bool(own) or len(self._everyones) > 0

    def add(self, slot: int, request: NewRequest) -> None:
        if own := request.sampling.extra_args.get("ban_token"):
            self._own[slot] = self._columns(own)

    def clear(self, slot: int) -> None:
        self._own.pop(slot, None)

    def apply(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        logits.index_fill_(1, self._everyones, float("-inf"))
        for row, slot in enumerate(context.host_slots.tolist()):
            if slot in self._own:
                logits[row].index_fill_(0, self._own[slot], float("-inf"))
        return logits

    def _columns(self, token_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(sorted(set(token_ids)), dtype=torch.int64, device=self._device)
