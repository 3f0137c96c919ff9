"""What both request states share: handing out slots, checking a request, and laying a step's rows out."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from workerkit.framework.errors import IntegrityError, RequestError
from workerkit.framework.interfaces.batch import BatchPlan
from workerkit.framework.interfaces.request import NewRequest, SchedulerOutput
from workerkit.framework.interfaces.runner import WorkerShape


class SlotMap:
    """Stable slots from a free stack, by request id."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots))[::-1]
        self._slots: dict[str, int] = {}

    def take(self, req_id: str) -> int:
        """Raises RequestError when the id is known or no slot is free."""
        if req_id in self._slots:
            raise RequestError(f"request {req_id!r} is already there")
        if not self._free:
            raise RequestError(f"no slot is free for request {req_id!r}: max_num_reqs is {self._num_slots}")
        slot = self._slots[req_id] = self._free.pop()
        return slot

    def release(self, req_id: str) -> int:
        """Raises RequestError for an unknown id."""
        slot = self[req_id]
        del self._slots[req_id]
        self._free.append(slot)
        return slot

    def __getitem__(self, req_id: str) -> int:
        try:
            return self._slots[req_id]
        except KeyError:
            raise RequestError(f"request {req_id!r} is not known") from None

    def of(self, req_ids: Iterable[str]) -> list[int]:
        """The slots of several. Raises RequestError for an unknown id."""
        try:
            return [self._slots[req_id] for req_id in req_ids]
        except KeyError as error:
            raise RequestError(f"request {error.args[0]!r} is not known") from None

    def __contains__(self, req_id: object) -> bool:
        return req_id in self._slots

    @property
    def req_ids(self) -> tuple[str, ...]:
        """Ids that hold a slot."""
        return tuple(self._slots)

    @property
    def free(self) -> tuple[int, ...]:
        """Slots that nobody holds."""
        return tuple(self._free)

    def check_integrity(self) -> None:
        """Raises IntegrityError when a slot is lost or held twice."""
        if sorted([*self._free, *self._slots.values()]) != list(range(self._num_slots)):
            raise IntegrityError(f"slots leak or repeat: free {self._free}, taken {self._slots}")


def check_request(request: NewRequest, shape: WorkerShape) -> None:
    """Raises RequestError for a request that no slot could hold."""
    name, tokens = f"request {request.req_id!r}", request.token_ids
    if not 1 <= len(tokens) <= shape.max_model_len:
        raise RequestError(f"{name} has {len(tokens)} tokens; right: 1 to max_model_len = {shape.max_model_len}")
    if not 1 <= request.prompt_len <= len(tokens):
        raise RequestError(f"{name} has prompt_len {request.prompt_len}; right: 1 to its {len(tokens)} tokens")
    if not 0 <= request.num_computed_tokens < len(tokens):
        raise RequestError(
            f"{name} has num_computed_tokens {request.num_computed_tokens}; right: 0 to {len(tokens) - 1}, "
            "for its last token has to be computed"
        )
    if min(tokens) < 0 or max(tokens) >= shape.vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < shape.vocab_size)
        raise RequestError(f"{name} has token id {wrong}; right: 0 to {shape.vocab_size - 1}")


def plan_rows(
    output: SchedulerOutput,
    shape: WorkerShape,
    slots: np.ndarray,
    num_computed_tokens: np.ndarray,
    prefill_lens: np.ndarray,
    prompt_lens: np.ndarray,
) -> BatchPlan:
    """Rows in the scheduler's order -> the plan: a stable sort that puts decode and verify rows before prefills.

    Raises RequestError for a step that contradicts what is known of its requests.
    """
    req_ids, num_reqs = tuple(output.num_scheduled_tokens), len(output.num_scheduled_tokens)
    scheduled = np.fromiter(output.num_scheduled_tokens.values(), np.int32, num_reqs)
    drafts = np.zeros(num_reqs, np.int32)
    prefilling = num_computed_tokens < prefill_lens
    ends = num_computed_tokens + scheduled
    wrong = {
        "no token is scheduled for it": scheduled < 1,
        f"it would pass max_model_len = {shape.max_model_len}": ends > shape.max_model_len,
        "more tokens are scheduled than are known": prefilling & (ends > prefill_lens),
    }
    if output.scheduled_drafts:
        if unknown := output.scheduled_drafts.keys() - output.num_scheduled_tokens.keys():
            raise RequestError(f"drafts are scheduled for requests that are not: {sorted(unknown)}")
        drafts[:] = [output.scheduled_drafts.get(req_id, 0) for req_id in req_ids]
        wrong["the worker keeps fewer drafts"] = (drafts < 0) | (drafts > shape.num_speculative_tokens)
        wrong["its prefill is not done, yet drafts are scheduled"] = prefilling & (drafts > 0)
    wrong["its prefill is done: right is 1 token and its drafts"] = ~prefilling & (scheduled != drafts + 1)
    if (total := output.total_num_scheduled_tokens) > shape.max_num_batched_tokens:
        raise RequestError(f"the step has {total} tokens, max_num_batched_tokens is {shape.max_num_batched_tokens}")
    if any(map(np.count_nonzero, wrong.values())):
        why, rows = next((why, rows) for why, rows in wrong.items() if rows.any())
        raise RequestError(f"request {req_ids[int(rows.argmax())]!r}: {why}")
    if np.count_nonzero(prefilling):  # decode and verify rows alone are in order
        order = np.argsort(prefilling, kind="stable")
        req_ids = tuple(req_ids[row] for row in order)
        columns = (slots, scheduled, num_computed_tokens, drafts, prefill_lens, prompt_lens)
        slots, scheduled, num_computed_tokens, drafts, prefill_lens, prompt_lens = (c[order] for c in columns)
    return BatchPlan(
        req_ids=req_ids,
        slots=slots,
        num_scheduled_tokens=scheduled,
        num_computed_tokens=num_computed_tokens,
        num_draft_tokens=drafts,
        prefill_lens=prefill_lens,
        prompt_lens=prompt_lens,
    )
