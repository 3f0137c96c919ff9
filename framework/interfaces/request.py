"""Requests and the two values of a step: what the scheduler asks for and what the worker answers."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
from attrs import validators

if TYPE_CHECKING:
    import numpy as np


def _optional(*checks: Any) -> Any:
    return validators.optional(validators.and_(*checks))


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How a request is sampled and when it ends. None means: what the worker's sampler is configured to do.

    temperature 0 is greedy; top_k 0 (or the vocabulary size) and top_p 1 are off.
    """

    temperature: float | None = attrs.field(default=None, validator=_optional(validators.ge(0.0)))
    top_k: int | None = attrs.field(default=None, validator=_optional(validators.ge(0)))
    top_p: float | None = attrs.field(default=None, validator=_optional(validators.gt(0.0), validators.le(1.0)))
    seed: int | None = attrs.field(default=None, validator=_optional(validators.ge(0), validators.lt(2**63)))
    max_tokens: int | None = attrs.field(default=None, validator=_optional(validators.ge(1)))
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@attrs.frozen(kw_only=True)
class NewRequest:
    """A request that enters the worker, or returns to it after a preemption (then with the tokens generated so far)."""

    req_id: str
    token_ids: tuple[int, ...]  # everything that has to be computed: prompt, then tokens generated before a preemption
    prompt_len: int  # <= len(token_ids) = prefill_len
    sampling: SamplingParams
    block_ids: tuple[tuple[int, ...], ...]  # manager blocks for each KV-cache group
    num_computed_tokens: int = 0

    @property
    def prefill_len(self) -> int:
        return len(self.token_ids)


@attrs.frozen(kw_only=True)
class CachedRequest:
    """A request that the worker already holds."""

    req_id: str
    num_computed_tokens: int  # before this step; with drafts or asynchronous scheduling an upper bound
    new_block_ids: tuple[tuple[int, ...], ...] = ()  # to append, for each KV-cache group; () when none


@attrs.frozen(kw_only=True)
class SchedulerOutput:
    """One step. A preempted request is forgotten by the worker and comes back as a NewRequest."""

    new_requests: tuple[NewRequest, ...] = ()
    cached_requests: tuple[CachedRequest, ...] = ()
    num_scheduled_tokens: Mapping[str, int] = attrs.field(factory=dict)  # every request of the step; drafts included
    scheduled_drafts: Mapping[str, int] = attrs.field(factory=dict)  # how many of them are drafts to verify
    finished_req_ids: frozenset[str] = frozenset()  # since the last step; aborted ones too
    preempted_req_ids: frozenset[str] = frozenset()
    blocks_to_zero: tuple[int, ...] = ()
    block_copies: tuple[tuple[int, int], ...] = ()

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@attrs.frozen(kw_only=True, eq=False)
class GrammarOutput:
    """Bitmasks of the structured requests of a step."""

    req_ids: tuple[str, ...]
    bitmask: np.ndarray  # [rows, ceil(V / 32)] int32, rows of a request follow each other, one a logits row


@attrs.frozen(kw_only=True)
class ModelRunnerOutput:
    """What a step produced; a partial prefill has an empty list."""

    req_ids: tuple[str, ...] = ()
    sampled_token_ids: tuple[tuple[int, ...], ...] = ()


class StepOutput(abc.ABC):
    """The result of a step, perhaps still on its way."""

    @abc.abstractmethod
    def get(self) -> ModelRunnerOutput:
        """Wait for the tokens. Raises what the step raised. The same value each time; `output_ready` fires once."""
