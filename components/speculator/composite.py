"""Several proposers in one worker: each request is served by one of them, which it may choose itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import attrs
import numpy as np
import torch

from workerkit.components.buffers.upload import upload
from workerkit.components.speculator.limits import num_drafts
from workerkit.framework.errors import RequestError, UnsupportedError, did_you_mean
from workerkit.framework.interfaces.request import NewRequest
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.interfaces.speculation import DraftInputs, Drafts, Speculator

_NONE = "none"


@attrs.frozen(kw_only=True)
class CompositeConfig:
    """Who serves requests that do not say."""

    default: str | None = attrs.field(
        default=None, metadata={"doc": "a proposer's name, or none; null takes the first of the list"}
    )


class CompositeSpeculator(Speculator):
    """A request brings `extra_args={"speculator": NAME}`, NAME being one of `proposers`, or none.

    Proposers hear of every request, and in a step that has a request of theirs they are asked for the whole batch; a
    request keeps its proposer as long as it lives. So a draft network sees every token of the requests that it serves.
    What it has not seen are prompt tokens that come from the prefix cache, where a request of another proposer has left
    them: its drafts are worse then, and the output is the same.
    """

    parameters: ClassVar[tuple[str, ...]] = ("speculator",)

    def __init__(self, config: CompositeConfig, shape: WorkerShape, proposers: Mapping[str, Speculator]) -> None:
        if not proposers:
            raise UnsupportedError("components.speculator.proposers: composite needs at least one")
        self._names = (*proposers, _NONE)
        self._proposers = (*proposers.values(),)
        self._default = self._names[0] if config.default is None else config.default
        if self._default not in self._names:
            hint = did_you_mean(self._default, self._names)
            raise UnsupportedError(f"components.speculator.default: no proposer {self._default!r}; {hint}")
        self._width, self._vocab_size = num_drafts(shape), shape.vocab_size
        self._chosen = np.full(shape.max_num_reqs, len(proposers))  # by slot: index into names

    @property
    def num_speculative_tokens(self) -> int:
        return max(proposer.num_speculative_tokens for proposer in self._proposers)

    @property
    def taps(self) -> Sequence[str]:
        return sorted({tap for proposer in self._proposers for tap in proposer.taps})

    def check(self, params: SamplingParams) -> None:
        name = self._name(params)
        if name not in self._names:
            hint = did_you_mean(str(name), self._names)
            raise RequestError(f"extra_args: no speculator {name!r} in this worker; {hint}")
        for proposer in self._proposers:
            proposer.check(params)

    def _name(self, params: SamplingParams) -> object:
        return params.extra_args.get("speculator", self._default)

    def add(self, slot: int, request: NewRequest) -> None:
        self._chosen[slot] = self._names.index(str(self._name(request.sampling)))
        for proposer in self._proposers:
            proposer.add(slot, request)

    def clear(self, slot: int) -> None:
        self._chosen[slot] = len(self._proposers)
        for proposer in self._proposers:
            proposer.clear(slot)

    def propose(self, inputs: DraftInputs) -> Drafts:
        num_reqs, device = inputs.batch.num_reqs, inputs.next_tokens.device
        chosen = self._chosen[inputs.batch.plan.slots]
        none = torch.full((num_reqs, self._width), -1, dtype=torch.int64, device=device)
        merged = Drafts(token_ids=none)
        for number, proposer in enumerate(self._proposers):
            own = chosen == number
            if own.any():
                drafts = proposer.propose(inputs)
                if own.all():
                    return drafts
                merged = self._with_rows(merged, drafts, own)
        return merged

    def _with_rows(self, merged: Drafts, drafts: Drafts, own: np.ndarray) -> Drafts:
        """`merged` with the rows of `drafts` that are `own`."""
        shape, device = merged.token_ids.shape, merged.token_ids.device
        (rows,) = upload(device, np.flatnonzero(own))

        def put(into: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return into.index_copy_(0, rows, values[rows])

        put(merged.token_ids, drafts.token_ids)
        logits, drawn, confidence = merged.logits, merged.drawn, merged.confidence
        if drafts.logits is not None:
            theirs = np.ones_like(own) if drafts.drawn is None else drafts.drawn
            drawn = (own & theirs) | (False if drawn is None else drawn)
            logits = put(
                torch.zeros(*shape, self._vocab_size, device=device) if logits is None else logits, drafts.logits
            )
        if drafts.confidence is not None:  # who does not say is taken at its word
            confidence = put(torch.ones(shape, device=device) if confidence is None else confidence, drafts.confidence)
        return Drafts(token_ids=merged.token_ids, logits=logits, drawn=drawn, confidence=confidence)
