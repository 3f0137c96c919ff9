"""Requests and the two values of a step: what the scheduler asks for and what the worker answers."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from workerkit.framework.interfaces.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np


@attrs.frozen(kw_only=True)
class NewRequest:
    """A request that enters the worker, or returns to it after a preemption (then with the tokens generated so far)."""

    req_id: str
    token_ids: tuple[int, ...]  # everything that has to be computed: prompt, then tokens generated before a preemption
    prompt_len: int  # <= len(token_ids) = prefill_len
    sampling: SamplingParams
    stop_ids: frozenset[int] = frozenset()  # every token that ends it, the model's own included
    block_ids: tuple[tuple[int, ...], ...]  # manager blocks for each KV-cache group
    num_computed_tokens: int = 0

    @property
    def prefill_len(self) -> int:
        return len(self.token_ids)


@attrs.frozen(kw_only=True, slots=False)  # one for each request and step: quicker to build
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


@attrs.frozen(kw_only=True, eq=False)
class Logprobs:
    """Log-probabilities at n positions, on the host. C columns: the token itself, the most likely ones in descending
    order, the chosen ones in the order in which they were asked for."""

    token_ids: np.ndarray  # [n, C] int64
    logprobs: np.ndarray  # [n, C] float32
    ranks: np.ndarray  # [n] int64, of the token itself: 1 + how many tokens are more likely
    num_top: int  # how many of the columns are the most likely ones


@attrs.frozen(kw_only=True)
class ModelRunnerOutput:
    """What a step produced; a partial prefill has an empty list of tokens.

    A sampled token of -1 says that no token was possible (or the logits were not finite); that request has failed.
    """

    req_ids: tuple[str, ...] = ()
    sampled_token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: Mapping[str, Logprobs] = attrs.field(factory=dict)  # one position a sampled token
    draft_token_ids: tuple[tuple[int, ...], ...] = ()  # of each request, for its next step; () without speculation
    prompt_logprobs: Mapping[str, Logprobs] = attrs.field(factory=dict)  # of the prompt tokens that this step predicted


class StepOutput(abc.ABC):
    """The result of a step, perhaps still on its way."""

    @abc.abstractmethod
    def get(self) -> ModelRunnerOutput:
        """Wait for the tokens. Raises what the step raised. The same value each time; `output_ready` fires once."""
