"""One step's batch: rows, tokens, and the parts that keep request state and build the batch from it."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs

from workerkit.framework.interfaces.request import CachedRequest, NewRequest, SchedulerOutput

if TYPE_CHECKING:
    import numpy as np
    import torch

    from workerkit.framework.interfaces.graph import BatchDescriptor
    from workerkit.framework.interfaces.sampling import SamplerOutput


@attrs.frozen(kw_only=True, eq=False, slots=False)  # without slots attrs builds it in half the time
class BatchPlan:
    """The rows of a step, decided on the host: decode and verify rows first. Arrays are fresh for each step."""

    req_ids: tuple[str, ...]
    slots: np.ndarray  # [num_reqs] int64, stable slots
    num_scheduled_tokens: np.ndarray  # [num_reqs] int32
    num_computed_tokens: np.ndarray  # [num_reqs] int32; upper bound while drafts are being verified
    num_draft_tokens: np.ndarray  # [num_reqs] int32
    prefill_lens: np.ndarray  # [num_reqs] int32: tokens known when the request entered
    prompt_lens: np.ndarray  # [num_reqs] int32

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)

    @property
    def num_tokens(self) -> int:
        return int(self.num_scheduled_tokens.sum())

    @property
    def is_prefilling(self) -> np.ndarray:
        """[num_reqs] bool: rows that read at least one token known beforehand."""
        result: np.ndarray = self.num_computed_tokens < self.prefill_lens
        return result

    @property
    def is_partial(self) -> np.ndarray:
        """[num_reqs] bool: rows that end before their prefill does; what is sampled for them is thrown away."""
        result: np.ndarray = self.num_computed_tokens + self.num_scheduled_tokens < self.prefill_lens
        return result


@attrs.frozen(kw_only=True, eq=False)
class HostLengths:
    """Sequence lengths on the host. Only `exact` may wait for the device."""

    upper_bound: np.ndarray  # [num_reqs] int32
    exact: Callable[[], np.ndarray]  # [num_reqs] int32


@attrs.frozen(kw_only=True, eq=False, slots=False)
class InputBatch:
    """Views into persistent buffers, valid until the next build.

    Rows beyond num_reqs and tokens beyond num_tokens are padding: length 0, position 0, slot -1.
    """

    plan: BatchPlan
    num_reqs: int
    num_reqs_padded: int
    num_tokens: int
    num_tokens_padded: int
    max_query_len: int
    idx_mapping: torch.Tensor  # [num_reqs] int64: row -> stable slot
    query_start_loc: torch.Tensor  # [num_reqs_padded + 1] int32, the tail repeats num_tokens
    query_start_loc_np: np.ndarray  # the same on the host
    seq_lens: torch.Tensor  # [num_reqs_padded] int32: computed + scheduled, exact
    host_seq_lens: HostLengths
    input_ids: torch.Tensor  # [num_tokens_padded] int32
    positions: torch.Tensor  # [num_tokens_padded] int64
    rope_lens: torch.Tensor  # [num_tokens_padded] int64: max(prompt_len, position + 1)
    token_rows: torch.Tensor  # [num_tokens_padded] int64: batch row of each token; padding points at row 0
    logits_indices: torch.Tensor  # [num_logits] int64: token whose hidden state predicts; drafts + 1 per row
    logits_rows: torch.Tensor  # [num_logits] int64: batch row of each logits row
    draft_ids: torch.Tensor  # [num_logits] int64: the draft that a logits row judges; -1: none, or a placeholder
    cu_num_logits_np: np.ndarray  # [num_reqs + 1] int32
    is_dummy: bool = False

    @property
    def req_ids(self) -> tuple[str, ...]:
        return self.plan.req_ids

    @property
    def num_logits(self) -> int:
        return int(self.cu_num_logits_np[-1])


class RequestStates(abc.ABC):
    """Hands out stable slots and remembers what a request has computed. At most max_num_reqs at a time."""

    @abc.abstractmethod
    def add(self, request: NewRequest) -> int:
        """Take a slot. Raises RequestError when the id is known or no slot is free."""

    @abc.abstractmethod
    def remove(self, req_id: str) -> int:
        """Free the slot and return it. Raises RequestError for an unknown id."""

    @abc.abstractmethod
    def slot(self, req_id: str) -> int:
        """Raises RequestError for an unknown id."""

    @abc.abstractmethod
    def __contains__(self, req_id: object) -> bool: ...

    @property
    @abc.abstractmethod
    def req_ids(self) -> tuple[str, ...]:
        """Ids that hold a slot."""

    @abc.abstractmethod
    def plan(self, output: SchedulerOutput) -> BatchPlan:
        """The rows of the step: verify and decode rows first, then prefills; ties keep the scheduler's order."""

    @abc.abstractmethod
    def check_integrity(self) -> None:
        """Raise IntegrityError when slots leak, repeat, or disagree with the maps."""


class HostRequestStates(RequestStates):
    """V1: everything on the host."""

    @abc.abstractmethod
    def update(self, request: CachedRequest) -> None:
        """Set num_computed_tokens and append the new blocks."""

    @abc.abstractmethod
    def get(self, req_id: str) -> HostRequest:
        """The request's own record."""

    @abc.abstractmethod
    def commit(self, plan: BatchPlan, sampled: Sequence[Sequence[int]]) -> None:
        """Append the sampled tokens of each row of the plan."""

    @abc.abstractmethod
    def next_tokens(self, plan: BatchPlan) -> np.ndarray:
        """[num_reqs] int64, after `commit`: see DraftInputs.next_tokens."""

    @abc.abstractmethod
    def store_drafts(self, plan: BatchPlan, drafts: Sequence[Sequence[int]]) -> None:
        """Keep the drafts of each row (-1 entries dropped) until they are verified."""


@attrs.define(kw_only=True, eq=False)
class HostRequest:
    """V1's record of one request."""

    slot: int
    request: NewRequest
    token_ids: list[int]  # known tokens: prompt and output
    num_computed_tokens: int
    block_ids: list[list[int]]  # manager blocks for each group
    drafts: list[int] = attrs.field(factory=list)


class SlotRequestStates(RequestStates):
    """V2: tokens and counts on the device, by slot; a mirror of upper bounds on the host."""

    @abc.abstractmethod
    def update(self, request: CachedRequest) -> None:
        """Set the host mirror of num_computed_tokens."""

    @abc.abstractmethod
    def write(self, slot: int, request: NewRequest) -> None:
        """On the stream: fill the slot's device state."""

    @abc.abstractmethod
    def commit(self, batch: InputBatch, output: SamplerOutput) -> None:
        """On the stream: append sampled tokens, advance num_computed_tokens by scheduled - rejected."""

    @abc.abstractmethod
    def next_tokens(self, batch: InputBatch) -> torch.Tensor:
        """[num_reqs] int64, on the stream, after `commit`: see DraftInputs.next_tokens."""

    @abc.abstractmethod
    def store_drafts(self, batch: InputBatch, drafts: torch.Tensor) -> None:
        """On the stream: drafts [num_reqs, K] int64 of each row, -1 = none."""

    @property
    @abc.abstractmethod
    def device(self) -> SlotTensors:
        """The tensors that an input batch gathers from."""


@attrs.frozen(kw_only=True, eq=False)
class SlotTensors:
    """V2's device state, R = max_num_reqs, L = max_model_len, K = drafts per request."""

    all_token_ids: torch.Tensor  # [R, L] int32: prompt and output
    prefill_len: torch.Tensor  # [R] int32
    prompt_len: torch.Tensor  # [R] int32
    total_len: torch.Tensor  # [R] int32: known tokens
    num_computed_tokens: torch.Tensor  # [R] int32
    last_sampled: torch.Tensor  # [R] int64
    draft_tokens: torch.Tensor  # [R, K] int64


class InputBatchBuilder(abc.ABC):
    """Builds the tensors of a step from a plan."""

    @abc.abstractmethod
    def build(self, plan: BatchPlan, desc: BatchDescriptor) -> InputBatch:
        """On the stream. Padded as `desc` says."""

    @abc.abstractmethod
    def dummy(self, num_tokens: int, num_reqs: int, desc: BatchDescriptor) -> InputBatch:
        """A batch of `num_reqs` made-up requests that share `num_tokens`; touches no request and no slot."""


class RowInputBatch(InputBatchBuilder):
    """V1: persistent host rows, condensed when a request leaves; moves the rows of its block table with them."""

    @abc.abstractmethod
    def sync(self, plan: BatchPlan, states: HostRequestStates) -> None:
        """Make the rows be the plan's: drop those not in it, add new ones, condense, reorder, append new blocks."""

    @abc.abstractmethod
    def remove(self, req_id: str) -> None:
        """Drop a request's row if it has one."""

    @abc.abstractmethod
    def check_integrity(self, states: HostRequestStates) -> None:
        """Raise IntegrityError when a row and the request's record disagree, or a row beyond the last is not empty."""

    @property
    @abc.abstractmethod
    def row_moves(self) -> int:
        """How many rows have been moved or swapped so far."""


class SlotInputBatch(InputBatchBuilder):
    """V2: gathers from SlotTensors through idx_mapping."""
