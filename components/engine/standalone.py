"""The standalone engine: one worker, a scheduler in front of it, and text at both ends."""

from __future__ import annotations

import logging
import random
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from numbers import Integral
from typing import Any, cast

import attrs

from workerkit.components.engine.admission import check_token_ids
from workerkit.components.engine.interrupts import interrupts_deferred
from workerkit.components.engine.live import GrowingCompletion, LiveRequest
from workerkit.components.engine.stop import StopStrings
from workerkit.framework.errors import IntegrityError, RequestError, StageError
from workerkit.framework.interfaces.engine import (
    ChatTemplate,
    Completion,
    Engine,
    EngineStats,
    FinishReason,
    Prompt,
    RequestDelta,
    Scheduler,
    Tokenizer,
)
from workerkit.framework.interfaces.kv_cache import KVLayout
from workerkit.framework.interfaces.request import ModelRunnerOutput, SamplingParams, SchedulerOutput, StepOutput
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.stages import Later
from workerkit.framework.interfaces.worker import Worker

_log = logging.getLogger(__name__)


def _check_seed(instance: object, attribute: attrs.Attribute[int | None], value: int | None) -> None:
    if value is not None and value < 0:
        raise ValueError(f"'{attribute.name}' must be >= 0 or null: {value}")


@attrs.frozen(kw_only=True)
class EngineConfig:
    """Options of the standalone engine."""

    seed: int | None = attrs.field(
        default=None,
        validator=_check_seed,
        metadata={"doc": "where the seeds of requests that bring none are drawn from; null: different in every run"},
    )


@attrs.define(eq=False)
class _Step:
    output: SchedulerOutput
    result: StepOutput | None = None


class StandaloneEngine(Engine):
    """Not to be used from two threads at once.

    An error of the worker ends the engine: its state is not known any more. All requests finish with "error", later
    calls raise StageError with the cause. Ctrl-C is held back until a step is whole.

    Deltas of requests from `add_request` are returned by `step`; those of `generate`, `stream` and `chat` go to their
    caller, whoever runs the step. `generate` and `stream` clean up their own requests, and no others.
    """

    def __init__(
        self,
        config: EngineConfig,
        worker: Worker,
        scheduler: Later[Scheduler],
        tokenizer: Later[Tokenizer],
        chat_template: Later[ChatTemplate],
    ) -> None:
        self._worker = worker
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._random = random.Random(secrets.randbits(128) if config.seed is None else config.seed)
        self._live: dict[str, LiveRequest] = {}
        self._in_flight: deque[_Step] = deque()  # oldest first
        self._outbox: deque[RequestDelta] = deque()  # what the next `step` returns
        self._ids = count()
        self._stopped: BaseException | None = None  # why no step can run any more
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0

    def start(self, progress: bool = False) -> None:
        from tqdm import tqdm

        parts: dict[str, Callable[[], object]] = {
            "worker": self._worker.start,
            "scheduler": self._scheduler,
            "tokenizer": self._tokenizer,
            "chat template": self._chat_template,
        }
        with tqdm(total=len(parts), disable=not progress, unit="part", leave=False) as bar:
            for name, start in parts.items():
                bar.set_description(f"starting {name}")
                start()
                bar.update()

    # Requests

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, req_id: str | None = None) -> str:
        req_id = self._new_id() if req_id is None else req_id
        self._add(self._encode(prompt), params, req_id, self._outbox)
        return req_id

    def _encode(self, prompt: Prompt) -> list[int]:
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return check_token_ids(token_ids, self.shape.vocab_size)

    def _new_id(self) -> str:
        return next(name for number in self._ids if (name := f"request-{number}") not in self._live)

    def _add(self, token_ids: list[int], params: SamplingParams | None, req_id: str, sink: deque[RequestDelta]) -> None:
        self._check_alive()
        params = params or SamplingParams()
        if params.seed is None:  # a request that is preempted must go on with the same random numbers
            params = attrs.evolve(params, seed=self._random.getrandbits(63))
        eos_ids = () if params.ignore_eos else self.tokenizer.eos_token_ids
        live = LiveRequest(self.tokenizer.detokenizer(token_ids), StopStrings(params.stop), sink)
        with interrupts_deferred():
            self._scheduler().add(req_id, token_ids, params, frozenset((*params.stop_token_ids, *eos_ids)))
            self._live[req_id] = live
            self._num_prompt_tokens += len(token_ids)

    def abort(self, req_id: str) -> None:
        """The request's last delta says "abort"."""
        with interrupts_deferred():
            if req_id in self._live:
                self._scheduler().abort(req_id)
                self._end(req_id, "abort")

    def _end(self, req_id: str, reason: FinishReason, error: str | None = None) -> None:
        delta = RequestDelta(req_id=req_id, token_ids=(), text="", finish_reason=reason, error=error)
        self._live.pop(req_id).sink.append(delta)

    def _drop(self, req_ids: Sequence[str]) -> None:
        """Forget requests that nobody waits for, and leave no step of theirs in flight."""
        with interrupts_deferred():
            for req_id in req_ids:
                if self._live.pop(req_id, None) is not None:
                    self._scheduler().abort(req_id)
        while self._in_flight:
            self._advance(fill=False)
        if self._stopped is None and self._scheduler().has_work and not self._scheduler().has_requests:
            self._advance()  # the worker has not heard yet that they are gone

    # Steps

    def step(self) -> list[RequestDelta]:
        if not self._outbox:
            self._advance()
        deltas = list(self._outbox)
        self._outbox.clear()
        return deltas

    def _advance(self, fill: bool = True) -> None:
        """Start steps as far as the scheduler allows (with `fill`), then collect the oldest."""
        self._check_alive()
        with interrupts_deferred():
            try:
                if fill:
                    self._fill()
                if self._in_flight:
                    self._collect()
            except BaseException as error:
                self._fail(error)
                if not isinstance(error, Exception):
                    raise

    def _fill(self) -> None:
        scheduler = self._scheduler()
        while scheduler.has_work and len(self._in_flight) < scheduler.max_in_flight:
            output = scheduler.schedule()
            if not output.num_scheduled_tokens:
                if output.finished_req_ids or output.preempted_req_ids:
                    self._worker.execute_model(output)
                    continue
                if not self._in_flight:
                    raise IntegrityError("the scheduler has requests, but schedules nothing and waits for nothing")
                return
            step = _Step(output)
            self._in_flight.append(step)
            self._worker.execute_model(output)
            step.result = self._worker.sample_tokens()
            self._num_steps += 1

    def _collect(self) -> None:
        step = self._in_flight[0]
        if step.result is None:
            raise IntegrityError("a step in flight has no result")
        results = self._scheduler().update(step.output, step.result.get())
        self._in_flight.popleft()
        for req_id, (tokens, reason) in results.items():
            try:
                self._deliver(req_id, tokens, reason)
            except Exception as error:  # of a tokenizer, say: a matter of this request alone
                _log.exception("request %r failed", req_id)
                self._scheduler().abort(req_id)
                self._end(req_id, "error", f"{type(error).__name__}: {error}")

    def _deliver(self, req_id: str, tokens: tuple[int, ...], reason: FinishReason | None) -> None:
        live = self._live[req_id]
        num_tokens, text, stopped = live.push(tokens, ended=reason is not None)
        if stopped:
            self._scheduler().abort(req_id)  # unless the scheduler ended it too
            reason = "stop"
        delta = RequestDelta(
            req_id=req_id,
            token_ids=tokens[:num_tokens],
            text=text,
            finish_reason=reason,
            error="the worker returned a token outside the vocabulary" if reason == "error" else None,
        )
        live.sink.append(delta)
        self._num_generated_tokens += num_tokens
        if reason is not None:
            del self._live[req_id]

    def _fail(self, error: BaseException) -> None:
        _log.error("the engine stops: a step failed", exc_info=error)
        self._stopped = error
        self._abort_all("error", f"{type(error).__name__}: {error}")

    def _abort_all(self, reason: FinishReason, error: str | None = None) -> None:
        for req_id in list(self._live):
            self._scheduler().abort(req_id)
            self._end(req_id, reason, error)
        while self._in_flight:
            self._scheduler().update(self._in_flight.popleft().output, ModelRunnerOutput())

    def _check_alive(self) -> None:
        if self._stopped is not None:
            raise StageError(f"the engine has stopped: {self._stopped!r}; assemble a new one") from self._stopped

    # Whole requests

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_progress: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        self._check_alive()
        if isinstance(prompts, str) or (len(prompts) > 0 and all(isinstance(item, Integral) for item in prompts)):
            prompts = [cast("Prompt", prompts)]
        many = cast("Sequence[Prompt]", prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(many)
        if len(params) != len(many):
            raise RequestError(
                f"{len(many)} prompts came with {len(params)} sampling params: give one for all or one each"
            )
        sink: deque[RequestDelta] = deque()
        waiting: dict[str, GrowingCompletion] = {}
        done: dict[int, Completion] = {}

        def finish(position: int, completion: Completion) -> None:
            done[position] = completion
            if on_progress is not None:
                on_progress(completion)

        try:
            for position, (prompt, its_params) in enumerate(zip(many, params, strict=True)):
                req_id = self._new_id()
                waiting[req_id] = collected = GrowingCompletion(req_id, position)
                try:
                    token_ids = self._encode(prompt)
                    collected.prompt_token_ids = tuple(token_ids)
                    self._add(token_ids, its_params, req_id, sink)
                except RequestError as error:
                    finish(position, waiting.pop(req_id).completion("error", str(error)))
            while waiting:
                while not sink:
                    self._advance()
                delta = sink.popleft()
                collected = waiting[delta.req_id]
                collected.token_ids.extend(delta.token_ids)
                collected.text += delta.text
                if delta.finish_reason is not None:
                    del waiting[delta.req_id]
                    finish(collected.position, collected.completion(delta.finish_reason, delta.error))
        finally:
            self._drop(list(waiting))
        return [done[position] for position in range(len(many))]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestDelta]:
        """Nothing is queued, and nothing refused, before the first delta is asked for."""
        sink: deque[RequestDelta] = deque()
        req_id = self._new_id()
        finished = False
        try:
            self._add(self._encode(prompt), params, req_id, sink)
            while not finished:
                while not sink:
                    self._advance()
                delta = sink.popleft()
                finished = delta.finish_reason is not None
                yield delta
        finally:
            self._drop([req_id])

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None
    ) -> Iterator[RequestDelta]:
        """The template is rendered at once. If it writes the beginning-of-text token, the tokenizer adds no second."""
        text = self._chat_template().render(messages)
        bos = self.tokenizer.bos_token
        template_has_bos = bos != "" and text.startswith(bos)
        return self.stream(self.tokenizer.encode(text, add_special_tokens=not template_has_bos), params)

    # What it looks like from outside

    @property
    def has_unfinished(self) -> bool:
        if self._stopped is not None:
            return bool(self._outbox)
        return bool(self._outbox or self._in_flight) or self._scheduler().has_work

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            **self._scheduler().stats(),
        )

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer()

    @property
    def shape(self) -> WorkerShape:
        return self._worker.shape

    @property
    def layout(self) -> KVLayout:
        return self._worker.layout

    def check_integrity(self) -> None:
        scheduler = self._scheduler()
        scheduler.check_integrity()
        self._worker.check_integrity()
        stats = scheduler.stats()
        if len(self._live) != stats["num_running"] + stats["num_waiting"]:
            raise IntegrityError(f"the engine has {len(self._live)} requests, the scheduler {dict(stats)}")

    def shutdown(self) -> None:
        """Unfinished requests end with "abort". Can be called at any time, and twice."""
        with interrupts_deferred():
            self._abort_all("abort")
            self._stopped = self._stopped or StageError("it was shut down")
            self._worker.shutdown()
