"""Requests and the two values of a step: what the scheduler asks for and what the worker answers."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from workerkit.framework.interfaces.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np


@attrs.frozen(kw_only=True, eq=False)
class ImageInput:
    """A picture of a prompt, cut into patches by the model's own processor."""

    start: int  # its first placeholder among the prompt's tokens
    num_tokens: int  # placeholders in a row; one takes merge_size ** 2 patches
    digest: str  # of the pixels and how they were processed: equal ones share what the encoder made of them
    pixels: np.ndarray  # [patches, channels * temporal patch * patch * patch] float32
    grid: tuple[int, int, int]  # patches along time, height and width


@attrs.frozen(kw_only=True)
class StateSave:
    """Keep a copy of a request's recurrent state, once its first `num_tokens` tokens are computed."""

    req_id: str
    num_tokens: int
    block_ids: tuple[int, ...]  # manager blocks that take it, KVLayout.state_blocks of them


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
    state_block_ids: tuple[int, ...] = ()  # where a copy of the state behind the computed tokens lies; (): none
    images: tuple[ImageInput, ...] = ()  # in the order of their tokens
    lora: str | None = None  # name of the adapter

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
    # Made after the step. The scheduler asks for what the step may reach; what is copied where it does not is not used.
    state_saves: tuple[StateSave, ...] = ()

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
