"""Fakes around a runner, and a runner itself: scheduler and engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from workerkit.framework.errors import RequestError, StageError
from workerkit.framework.interfaces.engine import (
    CacheIdentity,
    Completion,
    Engine,
    EngineRequest,
    EngineStats,
    FinishReason,
    Progress,
    Prompt,
    PromptInputs,
    RequestDelta,
    Scheduler,
)
from workerkit.framework.interfaces.kv_cache import KVLayout
from workerkit.framework.interfaces.request import (
    CachedRequest,
    GrammarOutput,
    ModelRunnerOutput,
    NewRequest,
    SchedulerOutput,
    StepOutput,
)
from workerkit.framework.interfaces.runner import ModelRunner, WorkerShape
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.interfaces.stages import Later
from workerkit.framework.interfaces.text import ChatTemplate, Detokenizer, Tokenizer
from workerkit.framework.interfaces.worker import Worker
from workerkit.framework.testing.fakes_model import fake_tokens


class Answer(StepOutput):
    """A result that is there already."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def get(self) -> ModelRunnerOutput:
        return self._output


class FakeRunner(ModelRunner):
    """Says what FakeNetwork would say, without a forward."""

    def __init__(self) -> None:
        self._tokens: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}
        self._pending: SchedulerOutput | None = None

    def check_request(self, params: SamplingParams) -> None:
        """There are no parts to ask."""

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput | None:
        if self._pending is not None:
            raise StageError("sample_tokens comes first")
        for req_id in (*output.finished_req_ids, *output.preempted_req_ids):
            self._tokens.pop(req_id, None)
        for new in output.new_requests:
            self._tokens[new.req_id], self._computed[new.req_id] = list(new.token_ids), new.num_computed_tokens
        for old in output.cached_requests:
            self._computed[old.req_id] = old.num_computed_tokens
        if not output.num_scheduled_tokens:
            return ModelRunnerOutput()
        self._pending = output
        return None

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> StepOutput:
        if self._pending is None:
            raise StageError("execute_model comes first")
        scheduled, self._pending = self._pending.num_scheduled_tokens, None
        sampled: list[tuple[int, ...]] = []
        for req_id, count in scheduled.items():
            tokens = self._tokens[req_id]
            is_partial = self._computed[req_id] + count < len(tokens)
            sampled.append(() if is_partial else tuple(fake_tokens(tokens, 1)))
            tokens.extend(sampled[-1])
        return Answer(ModelRunnerOutput(req_ids=tuple(scheduled), sampled_token_ids=tuple(sampled)))

    def execute_dummy_batch(self, num_tokens: int, num_reqs: int) -> None:
        """There are no collectives."""

    def capture(self) -> None:
        """There are no graphs."""

    def graph_memory(self) -> int:
        return 0

    def release_graphs(self) -> None:
        """There are no graphs."""

    def check_integrity(self) -> None:
        """There are no blocks."""

    @property
    def num_requests(self) -> int:
        return len(self._tokens)


class FakeScheduler(Scheduler):
    """Whole prompts, first come first served, all blocks for the longest output at once; no preemption."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._waiting: list[NewRequest] = []
        self._running: dict[str, tuple[NewRequest, list[int]]] = {}
        self._finished: set[str] = set()
        self._free: list[int] | None = None

    @property
    def max_in_flight(self) -> int:
        return 1

    def add(self, request: EngineRequest) -> None:
        new = NewRequest(
            req_id=request.req_id,
            token_ids=request.prompt_token_ids,
            prompt_len=len(request.prompt_token_ids),
            sampling=request.params,
            stop_ids=request.stop_ids,
            block_ids=(),
        )
        if new.req_id in self._running:
            raise RequestError(f"request id {new.req_id!r} is in use")
        if new.prompt_len >= self._worker.shape.max_model_len or self._blocks(new) >= self._worker.layout.num_blocks:
            raise RequestError(f"request {new.req_id!r} can never fit")
        self._waiting.append(new)
        self._running[new.req_id] = (new, [])

    def _blocks(self, new: NewRequest) -> int:
        num_drafts = self._worker.shape.num_speculative_tokens
        longest = new.prompt_len + (new.sampling.max_tokens or 16) + (num_drafts and num_drafts + 1)
        longest = min(longest, self._worker.shape.max_model_len)  # DraftInputs.tables
        return -(-longest // self._worker.layout.block_sizes[0])

    def abort(self, req_id: str) -> bool:
        if req_id not in self._running:
            return False
        self._end(req_id)
        return True

    def _end(self, req_id: str) -> None:
        new, _ = self._running.pop(req_id)
        if self._waiting and new in self._waiting:
            self._waiting.remove(new)
        else:
            self._finished.add(req_id)
            assert self._free is not None
            self._free.extend(new.block_ids[0])

    def schedule(self) -> SchedulerOutput:
        if self._free is None:
            self._free = list(range(1, self._worker.layout.num_blocks))
        old = [new for new, _ in self._running.values() if new not in self._waiting]
        admitted: list[NewRequest] = []
        room = self._worker.shape.max_num_reqs - len(old)
        budget = self._worker.shape.max_num_batched_tokens - len(old)
        while self._waiting and len(admitted) < room:
            new, count = self._waiting[0], self._blocks(self._waiting[0])
            if count > len(self._free) or new.prompt_len > budget:
                break
            self._waiting.pop(0)
            budget -= new.prompt_len
            blocks = tuple(self._free.pop(0) for _ in range(count))
            placed = NewRequest(
                req_id=new.req_id,
                token_ids=new.token_ids,
                prompt_len=new.prompt_len,
                sampling=new.sampling,
                stop_ids=new.stop_ids,
                block_ids=(blocks,),
            )
            admitted.append(placed)
            self._running[new.req_id] = (placed, self._running[new.req_id][1])
        cached = [
            CachedRequest(req_id=r.req_id, num_computed_tokens=r.prompt_len + len(self._running[r.req_id][1]) - 1)
            for r in old
        ]
        finished, self._finished = frozenset(self._finished), set()
        return SchedulerOutput(
            new_requests=tuple(admitted),
            cached_requests=tuple(cached),
            num_scheduled_tokens={**{r.req_id: 1 for r in old}, **{r.req_id: r.prompt_len for r in admitted}},
            finished_req_ids=finished,
        )

    def update(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> Mapping[str, Progress]:
        result: dict[str, Progress] = {}
        for req_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            if req_id not in self._running:
                continue
            new, so_far = self._running[req_id]
            so_far.extend(tokens)
            reason: FinishReason | None = None
            if tokens[-1] < 0:
                tokens, reason = tokens[:-1], "error"
            elif tokens[-1] in new.stop_ids:
                tokens, reason = tokens[:-1], "stop"
            elif len(so_far) >= min(new.sampling.max_tokens or 16, self._worker.shape.max_model_len - new.prompt_len):
                reason = "length"
            if reason:
                self._end(req_id)
            result[req_id] = Progress(token_ids=tokens, finish_reason=reason)
        return result

    def reset_prefix_cache(self) -> None:
        """It keeps no block for later."""

    @property
    def has_requests(self) -> bool:
        return bool(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._finished)

    def stats(self) -> Mapping[str, int]:
        running = len(self._running) - len(self._waiting)
        free = len(self._free or ())
        return {
            "num_running": running,
            "num_waiting": len(self._waiting),
            "num_free_blocks": free,
            "num_preemptions": 0,
            "num_cached_tokens": 0,
        }

    def check_integrity(self) -> None:
        """Nothing is shared that could go wrong."""


class FakeEngine(Engine):
    """One step at a time, text at the end. One completion a request, and no log-probabilities."""

    def __init__(
        self, worker: Worker, scheduler: Later[Scheduler], tokenizer: Tokenizer, chat_template: Later[ChatTemplate]
    ) -> None:
        self._worker = worker
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._texts: dict[str, Detokenizer] = {}
        self._count = 0
        self._steps = 0

    def start(self, progress: bool = False) -> None:
        self._worker.start()

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        req_id: str | None = None,
        *,
        priority: int = 0,
        cache_identity: CacheIdentity | None = None,
    ) -> str:
        inputs = prompt if isinstance(prompt, PromptInputs) else PromptInputs(prompt=prompt)
        text = inputs.prompt
        ids = tuple(self._tokenizer.encode(text) if isinstance(text, str) else text)
        if not ids:
            raise RequestError("the prompt is empty")
        self._count += 1
        req_id = req_id or f"fake-{self._count}"
        params = params or SamplingParams()
        self._worker.check_request(params)
        eos_ids = () if params.ignore_eos else self._tokenizer.eos_token_ids
        self._scheduler().add(
            EngineRequest(
                req_id=req_id,
                prompt_token_ids=ids,
                params=params,
                stop_ids=frozenset((*params.stop_token_ids, *eos_ids)),
                priority=priority,
                cache_identity=cache_identity or CacheIdentity(),
                lora=inputs.lora,
            )
        )
        self._prompts[req_id], self._texts[req_id] = ids, self._tokenizer.detokenizer(ids)
        return req_id

    def abort(self, req_id: str) -> None:
        self._scheduler().abort(req_id)
        self._prompts.pop(req_id, None)

    def reset_prefix_cache(self) -> None:
        self._scheduler().reset_prefix_cache()

    def step(self) -> list[RequestDelta]:
        scheduled = self._scheduler().schedule()
        self._steps += 1
        output = self._worker.execute_model(scheduled)
        if output is None:
            output = self._worker.sample_tokens().get()
        deltas = []
        for req_id, progress in self._scheduler().update(scheduled, output).items():
            tokens, reason = progress.token_ids, progress.finish_reason
            text = self._texts[req_id].push(tokens)
            if reason:
                text += self._texts.pop(req_id).flush()
                self._prompts.pop(req_id)
            deltas.append(RequestDelta(req_id=req_id, token_ids=tokens, text=text, finish_reason=reason))
        return deltas

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_progress: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        one = isinstance(prompts, str | PromptInputs) or (bool(prompts) and isinstance(prompts[0], int))
        several = cast("Sequence[Prompt]", [prompts] if one else prompts)
        each = [params] * len(several) if params is None or isinstance(params, SamplingParams) else params
        results = []
        for prompt, param in zip(several, each, strict=True):
            req_id = self.add_request(prompt, param)
            ids = self._prompts[req_id]
            deltas = [*self._deltas(req_id)]
            results.append(
                Completion(
                    req_id=deltas[-1].req_id,
                    prompt_token_ids=ids,
                    token_ids=tuple(t for delta in deltas for t in delta.token_ids),
                    text="".join(delta.text for delta in deltas),
                    finish_reason=deltas[-1].finish_reason or "stop",
                )
            )
            if on_progress:
                on_progress(results[-1])
        return results

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestDelta]:
        yield from self._deltas(self.add_request(prompt, params))

    def _deltas(self, req_id: str) -> Iterator[RequestDelta]:
        while req_id in self._prompts:
            yield from (delta for delta in self.step() if delta.req_id == req_id)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, lora: str | None = None
    ) -> Iterator[RequestDelta]:
        return self.stream(PromptInputs(prompt=self._chat_template().render(messages), lora=lora), params)

    @property
    def has_unfinished(self) -> bool:
        return self._scheduler().has_requests

    @property
    def stats(self) -> EngineStats:
        return EngineStats(num_steps=self._steps)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def shape(self) -> WorkerShape:
        return self._worker.shape

    @property
    def layout(self) -> KVLayout:
        return self._worker.layout

    def check_integrity(self) -> None:
        self._scheduler().check_integrity()
        self._worker.check_integrity()

    def shutdown(self) -> None:
        self._worker.shutdown()
