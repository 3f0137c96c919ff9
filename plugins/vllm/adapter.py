"""Between vLLM's values and ours: requests and steps one way, tokens, log-probabilities and drafts the other.

Both of vLLM's protocols are read. V1's runner is told of a request that comes back after a preemption among the cached
ones (`resumed_req_ids`, with `all_token_ids`), V2's gets it as a new one (with `prefill_token_ids`). Our workers know
only the second form.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from vllm.v1.outputs import DraftTokenIds, LogprobsLists, LogprobsTensors
from vllm.v1.outputs import ModelRunnerOutput as VllmOutput

from workerkit.framework.errors import RequestError, UnsupportedError, WorkerkitError
from workerkit.framework.interfaces.request import (
    CachedRequest,
    GrammarOutput,
    Logprobs,
    ModelRunnerOutput,
    NewRequest,
    SchedulerOutput,
)
from workerkit.plugins.vllm.adapters import Adapters
from workerkit.plugins.vllm.cache import Blocks
from workerkit.plugins.vllm.params import sampling_params, unserved
from workerkit.plugins.vllm.pictures import pictures

# Fields of vLLM's values that are translated, and those that the worker need not know. Any other must be empty, those
# of later versions included.
_OF_A_REQUEST = frozenset(
    {
        "req_id",
        "prompt_token_ids",
        "sampling_params",
        "block_ids",
        "num_computed_tokens",
        "prefill_token_ids",
        "lora_request",
        "mm_features",
    }
)
_OF_A_STEP = frozenset(
    {
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
        "finished_req_ids",
        "preempted_req_ids",
        "pending_structured_output_tokens",
        "new_block_ids_to_zero",
        "kv_cache_block_copies",
    }
)
_OF_THE_SCHEDULER = frozenset(
    {
        "has_structured_output_requests",
        "num_invalid_spec_tokens",
        "num_spec_tokens_to_schedule",
        "num_common_prefix_blocks",
        "scheduled_encoder_inputs",  # our encoder finds what a step needs, and keeps what it has room for
        "scheduled_encoder_input_stats",
        "free_encoder_mm_hashes",
        "kv_connector_block_state",
    }
)
_KNOWN_OF_A_STEP = _OF_A_STEP | _OF_THE_SCHEDULER


@dataclasses.dataclass
class FailingOutput(VllmOutput):
    """A step's answer, with the requests that failed in it and why: our scheduler ends them with an error."""

    failed: dict[str, str] = dataclasses.field(default_factory=dict)


@attrs.define(eq=False)
class _Stay:
    """What the worker gave for a request since it last entered."""

    prompt_is_due: bool  # its prompt's log-probabilities are asked for and not delivered
    drafts: list[int] = attrs.field(factory=list)  # that it holds to be verified
    prompt: list[Logprobs] = attrs.field(factory=list)  # pieces of its prompt's log-probabilities


@attrs.define(eq=False)
class _Live:
    """A request that vLLM has not finished."""

    request: NewRequest  # as it last entered
    stay: _Stay | None  # None: preempted


@attrs.frozen(eq=False, kw_only=True)
class Step:
    """A step as our worker is to run it."""

    output: SchedulerOutput
    req_ids: Sequence[str]  # all that vLLM scheduled, in its order
    mask_rows: Mapping[str, int]  # logits rows, as vLLM counts them
    running: Mapping[str, _Stay]  # those that the worker runs
    failed: Mapping[str, str]  # those that it refuses, and why


class Requests:
    """What vLLM has told of its requests. `check` raises RequestError for one that the worker cannot serve; `adapters`
    loads those that requests name; `seed`: where seeds of requests that bring none are drawn from, the same on all
    ranks."""

    def __init__(self, check: Callable[[NewRequest], None], adapters: Adapters, seed: int) -> None:
        self._check = check
        self._adapters = adapters
        self._random = random.Random(seed)
        self.blocks = Blocks()  # as vLLM's groups have them, until the cache is cut
        self._live: dict[str, _Live] = {}
        self._refused: dict[str, str] = {}  # vLLM goes on to schedule them until it has heard

    # vLLM's steps as ours

    def read(self, scheduled: Any) -> Step:
        """A vLLM SchedulerOutput. Raises UnsupportedError for fields that are set and that nothing here serves."""
        if names := _set_beyond(scheduled, _KNOWN_OF_A_STEP):
            raise UnsupportedError(f"vLLM's scheduler asks for what this worker does not serve: {', '.join(names)}")
        leaving = set(scheduled.preempted_req_ids or ())
        for req_id in scheduled.finished_req_ids:
            self._live.pop(req_id, None)
            self._refused.pop(req_id, None)
        for req_id in leaving & self._live.keys():
            self._live[req_id].stay = None
        finished = frozenset(scheduled.finished_req_ids)
        self._adapters.begin()
        new = self._read_new(scheduled, leaving)
        cached = self._read_cached(scheduled, leaving, new)
        fresh = {request.req_id for request in new}
        counts, drafts, mask_rows = {}, {}, {}
        for req_id, count in scheduled.num_scheduled_tokens.items():
            proposed = scheduled.scheduled_spec_decode_tokens.get(req_id, ())
            mask_rows[req_id] = 1 + len(proposed)
            if req_id in self._refused:
                continue
            kept = self._usable_drafts(req_id, proposed, fresh, scheduled.pending_structured_output_tokens)
            counts[req_id] = count - len(proposed) + kept
            if kept:
                drafts[req_id] = kept
        return Step(
            output=SchedulerOutput(
                new_requests=tuple(new),
                cached_requests=tuple(cached),
                num_scheduled_tokens=counts,
                scheduled_drafts=drafts,
                finished_req_ids=finished,
                preempted_req_ids=frozenset(leaving),
                blocks_to_zero=(*(scheduled.new_block_ids_to_zero or ()), *self.blocks.to_zero(new, cached)),
                block_copies=tuple(map(tuple, scheduled.kv_cache_block_copies or ())),
            ),
            req_ids=tuple(scheduled.num_scheduled_tokens),
            mask_rows=mask_rows,
            running={req_id: stay for req_id in counts if (stay := self._live[req_id].stay)},
            failed={r: self._refused[r] for r in scheduled.num_scheduled_tokens if r in self._refused},
        )

    def _usable_drafts(self, req_id: str, proposed: Sequence[int], fresh: set[str], masks_wait: bool) -> int:
        """How many of the drafts that vLLM has scheduled our worker verifies. It may be fewer: the scheduler then hears
        of rejections."""
        if req_id in fresh:
            return 0  # vLLM pads a request that enters with one token to the size of the others
        structured = self._live[req_id].request.sampling.structured_outputs is not None
        if structured and not masks_wait and -1 in proposed:
            return list(proposed).index(-1)  # vLLM makes no masks behind drafts that it does not know
        return len(proposed)

    def _read_new(self, scheduled: Any, leaving: set[str]) -> list[NewRequest]:
        new = []
        for data in scheduled.scheduled_new_reqs:
            known = self._live.get(data.req_id)
            if known is not None and known.stay:  # a session goes on with more input, and perhaps other parameters
                leaving.add(data.req_id)
                known = None
            try:
                new.append(self._enter(self._new(data, known)))
            except (WorkerkitError, ValueError, TypeError) as error:
                self._refuse(data.req_id, error)
        return new

    def _refuse(self, req_id: str, error: Exception) -> None:
        self._refused[req_id] = str(error.args[0])  # those of attrs carry more than the message
        self._live.pop(req_id, None)

    def _new(self, data: Any, known: _Live | None) -> NewRequest:
        problems = [*_set_beyond(data, _OF_A_REQUEST)]
        if data.prompt_token_ids is None or data.sampling_params is None:
            raise RequestError("only requests with prompt tokens and sampling parameters are served")
        problems += [f"sampling_params.{name}" for name in unserved(data.sampling_params)]
        if problems:
            raise RequestError(f"this worker does not serve {', '.join(problems)}")
        if known is None:
            sampling = sampling_params(data.sampling_params, self._random.getrandbits(63))
        else:
            sampling = known.request.sampling
        request = NewRequest(
            req_id=data.req_id,
            token_ids=tuple(data.prefill_token_ids or data.prompt_token_ids),
            prompt_len=len(data.prompt_token_ids),
            sampling=sampling,
            stop_ids=frozenset(data.sampling_params.all_stop_token_ids),
            block_ids=self.blocks.of_groups(data.block_ids),
            num_computed_tokens=data.num_computed_tokens,
            images=pictures(data.mm_features),
            lora=self._adapters.name(data.lora_request),
        )
        self._check(request)
        self._adapters.use(request.lora)
        return request

    def _read_cached(self, scheduled: Any, leaving: set[str], new: list[NewRequest]) -> list[CachedRequest]:
        data, cached = scheduled.scheduled_cached_reqs, []
        for req_id, blocks, computed in zip(data.req_ids, data.new_block_ids, data.num_computed_tokens, strict=True):
            if req_id in self._refused:
                continue
            live = self._live[req_id]
            if live.stay and req_id not in data.resumed_req_ids:
                cached.append(
                    CachedRequest(
                        req_id=req_id,
                        num_computed_tokens=computed,
                        new_block_ids=self.blocks.of_groups(blocks),
                    )
                )
                continue
            if live.stay:
                leaving.add(req_id)
            try:
                self._adapters.use(live.request.lora)
            except WorkerkitError as error:
                self._refuse(req_id, error)
                continue
            request = attrs.evolve(
                live.request,
                token_ids=tuple(data.all_token_ids[req_id]),
                block_ids=self.blocks.of_groups(blocks),
                num_computed_tokens=computed,
            )
            new.append(self._enter(request))
        return cached

    def _enter(self, request: NewRequest) -> NewRequest:
        """A request that brings tokens is not asked for its prompt's log-probabilities again: vLLM has received them
        with the first one. Answers cannot tell that, because vLLM drops some that were on their way."""
        if request.prefill_len > request.prompt_len:
            request = attrs.evolve(request, sampling=attrs.evolve(request.sampling, prompt_logprobs=None))
        stay = _Stay(prompt_is_due=request.sampling.prompt_logprobs is not None)
        self._live[request.req_id] = _Live(request, stay)
        return request

    def forget(self) -> SchedulerOutput:
        """A step that makes the worker forget every request: vLLM brings those back that it has not finished."""
        here = frozenset(req_id for req_id, live in self._live.items() if live.stay)
        for req_id in here:
            self._live[req_id].stay = None
        return SchedulerOutput(preempted_req_ids=here)

    @staticmethod
    def masks(step: Step, grammar: Any) -> GrammarOutput | None:
        """A vLLM GrammarOutput. vLLM fills the same memory again for the next step, hence the copy."""
        if grammar is None:
            return None
        rows: list[int] = []
        begin, req_ids = 0, []
        for req_id in grammar.structured_output_request_ids:
            if req_id in step.output.num_scheduled_tokens:
                req_ids.append(req_id)
                rows.extend(range(begin, begin + 1 + step.output.scheduled_drafts.get(req_id, 0)))
            begin += step.mask_rows[req_id]
        return GrammarOutput(req_ids=tuple(req_ids), bitmask=grammar.grammar_bitmask[rows])

    # Our answers as vLLM's

    def answer(self, step: Step, result: ModelRunnerOutput) -> FailingOutput:
        """What a step came to. May be called from another thread than `read`, once a step and in their order."""
        sampled = dict(zip(result.req_ids, result.sampled_token_ids, strict=True))
        failed = dict(step.failed)
        for req_id, tokens in sampled.items():
            if -1 in tokens:
                failed[req_id] = "no token was possible: the logits were not finite, or every token was banned"
        for req_id, drafts in zip(result.req_ids, result.draft_token_ids, strict=bool(result.draft_token_ids)):
            step.running[req_id].drafts = list(drafts)
        for req_id, piece in result.prompt_logprobs.items():
            step.running[req_id].prompt.append(piece)
        tokens_of = [[] if req_id in failed else list(sampled.get(req_id, ())) for req_id in step.req_ids]
        return FailingOutput(
            req_ids=list(step.req_ids),
            req_id_to_index={req_id: index for index, req_id in enumerate(step.req_ids)},
            sampled_token_ids=tokens_of,
            logprobs=_logprobs(step.req_ids, tokens_of, result.logprobs) if result.logprobs else None,
            prompt_logprobs_dict=_prompts(step, tokens_of),
            failed=failed,
        )

    def drafts(self) -> DraftTokenIds:
        """What the worker holds to be verified, of all requests: vLLM may have left some out of the last step."""
        held = {req_id: live.stay.drafts for req_id, live in self._live.items() if live.stay}
        return DraftTokenIds(req_ids=list(held), draft_token_ids=list(held.values()))


def _set_beyond(value: Any, known: frozenset[str]) -> list[str]:
    """Fields of a dataclass that are not known and not empty."""
    unknown = ((name, content) for name, content in vars(value).items() if name not in known)
    return [name for name, content in unknown if isinstance(content, torch.Tensor) or content]


def _columns(logprobs: Logprobs) -> list[int]:
    """vLLM wants the token itself and either the chosen ones or the most likely ones."""
    width, chosen = logprobs.token_ids.shape[1], 1 + logprobs.num_top
    return [0, *range(chosen, width)] if width > chosen else [*range(width)]


def _logprobs(
    req_ids: Sequence[str], tokens: Sequence[Sequence[int]], logprobs: Mapping[str, Logprobs]
) -> LogprobsLists:
    """One row a sampled token of every request; requests that asked for fewer columns, or none, leave the rest 0."""
    columns = {req_id: _columns(part) for req_id, part in logprobs.items()}
    starts = np.cumsum([0, *map(len, tokens)]).tolist()
    width = max(map(len, columns.values()))
    ids, values = np.zeros((starts[-1], width), np.int64), np.zeros((starts[-1], width), np.float32)
    ranks = np.ones(starts[-1], np.int64)
    for req_id, start, end in zip(req_ids, starts, starts[1:], strict=False):
        if req_id in columns and end > start:
            part, wanted = logprobs[req_id], columns[req_id]
            ids[start:end, : len(wanted)] = part.token_ids[:, wanted]
            values[start:end, : len(wanted)] = part.logprobs[:, wanted]
            ranks[start:end] = part.ranks
    return LogprobsLists(ids, values, ranks, starts)


def _prompts(step: Step, tokens: Sequence[Sequence[int]]) -> dict[str, LogprobsTensors]:
    """Prompts that are complete: vLLM wants them whole, with the first token."""
    done = {}
    for req_id, sampled in zip(step.req_ids, tokens, strict=True):
        stay = step.running.get(req_id)
        if stay is not None and stay.prompt_is_due and sampled:
            stay.prompt_is_due = False
            pieces, stay.prompt = stay.prompt, []
            done[req_id] = LogprobsTensors(
                _joined([piece.token_ids for piece in pieces], np.zeros((0, 1), np.int64)),
                _joined([piece.logprobs for piece in pieces], np.zeros((0, 1), np.float32)),
                _joined([piece.ranks for piece in pieces], np.zeros(0, np.int64)),
            )
    return done


def _joined(pieces: list[np.ndarray], none: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(pieces or [none]))
