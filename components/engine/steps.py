"""The loop around the worker: steps are planned, started and collected, and what they add goes to who waits for it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import attrs

from workerkit.components.engine.live import LiveCompletion, LiveRequests
from workerkit.components.engine.logprobs import PromptPieces
from workerkit.components.engine.structured import StructuredRequests
from workerkit.framework.errors import IntegrityError, RequestError
from workerkit.framework.interfaces.engine import EngineRequest, Progress, Scheduler
from workerkit.framework.interfaces.request import ModelRunnerOutput, SchedulerOutput, StepOutput
from workerkit.framework.interfaces.stages import Later
from workerkit.framework.interfaces.structured import GrammarMatcher
from workerkit.framework.interfaces.worker import Worker

_log = logging.getLogger(__name__)


@attrs.define(eq=False)
class _Step:
    output: SchedulerOutput
    prompt_pieces: Mapping[str, PromptPieces]  # where its share goes, of the requests that want it
    result: StepOutput | None = None


class Steps:
    """Everything that the engine keeps of requests that are not finished.

    What an error of scheduler or worker leaves behind is not known: after one only `abandon` may be called.
    """

    def __init__(self, worker: Worker, scheduler: Later[Scheduler]) -> None:
        self._worker = worker
        self._scheduler = scheduler
        self._in_flight: deque[_Step] = deque()  # oldest first
        self._cache_generation = 0
        self.live = LiveRequests()
        self.num_steps = 0
        self.num_generated_tokens = 0

    @cached_property
    def _grammars(self) -> StructuredRequests:
        return StructuredRequests(self._worker.shape.vocab_size)

    @property
    def in_flight(self) -> int:
        """Steps that are started and not collected."""
        return len(self._in_flight)

    # Completions come and go

    def queue(
        self,
        requests: Iterable[EngineRequest],
        completions: Sequence[LiveCompletion],
        matchers: Sequence[GrammarMatcher],
    ) -> None:
        """All completions of one request, or none; `matchers` is empty when it is not structured."""
        scheduler, queued = self._scheduler(), []
        try:
            for request in requests:
                scheduler.add(request)
                queued.append(request.req_id)
        except BaseException:
            for name in queued:
                scheduler.abort(name)
            raise
        self.live.add(completions)
        if matchers:
            for completion, matcher in zip(completions, matchers, strict=True):
                self._grammars.add(completion.name, matcher)

    def drop(self, completion: LiveCompletion) -> None:
        """Forget it, wherever it is; nobody is told."""
        self._scheduler().abort(completion.name)
        self.live.remove(completion)
        self._grammars.remove(completion.name)

    # Steps

    def fill(self) -> bool:
        """Start steps as far as the scheduler allows. True when others had to be collected for that: there may be
        deltas then."""
        scheduler = self._scheduler()
        if self._worker.cache_generation != self._cache_generation:  # it slept
            self._cache_generation = self._worker.cache_generation
            scheduler.reset_prefix_cache()
        while scheduler.has_work and len(self._in_flight) < scheduler.max_in_flight:
            output = scheduler.schedule()
            for name in output.preempted_req_ids:
                self.live[name].restart()
            if not output.num_scheduled_tokens:
                if output.finished_req_ids or output.preempted_req_ids:
                    self._worker.execute_model(output)
                    continue
                if not self._in_flight:
                    raise IntegrityError("the scheduler has requests, but schedules nothing and waits for nothing")
                return False
            if self._start(output):
                return True
        return False

    def _start(self, output: SchedulerOutput) -> bool:
        """Whether the steps before had to be collected: a grammar's mask depends on their tokens. The forward does not,
        and runs meanwhile."""
        step = _Step(output, self.live.prompt_pieces(output.num_scheduled_tokens))
        self._in_flight.append(step)
        self._worker.execute_model(output)
        must_wait = len(self._in_flight) > 1 and bool(self._grammars.waits_for(output))
        while must_wait and self._in_flight[0] is not step:
            self.collect()
        step.result = self._worker.sample_tokens(self._grammars.output(output))
        self.num_steps += 1
        return must_wait

    def collect(self) -> None:
        """Wait for the oldest step, and deliver what it has added."""
        step = self._in_flight[0]
        if step.result is None:
            raise IntegrityError("a step in flight has no result")
        output = step.result.get()
        results = self._scheduler().update(step.output, output)
        self._in_flight.popleft()
        for name, pieces in step.prompt_pieces.items():
            if (piece := output.prompt_logprobs.get(name)) is not None:
                pieces.add(piece)
        self._grammars.take_drafts(output)
        for name, progress in results.items():
            completion = self.live[name]
            try:
                self._deliver(completion, progress, output)
            except Exception as error:  # of a tokenizer or a grammar, say: a matter of this completion alone
                _log.exception("completion %d of request %r failed", completion.index, completion.req_id)
                self.drop(completion)
                completion.end("error", str(error) if isinstance(error, RequestError) else in_words(error))

    def _deliver(self, completion: LiveCompletion, progress: Progress, output: ModelRunnerOutput) -> None:
        """What ends a completion, in this order: the scheduler (stop ids, lengths), a complete grammar, a stop string
        in the text. Where several would in one step, each looks only at the tokens that the ones before have left."""
        name, reason = completion.name, progress.finish_reason
        if completion.is_structured and (count := self._grammars.accept(name, progress.token_ids)) is not None:
            progress, reason = attrs.evolve(progress, token_ids=progress.token_ids[:count]), "stop"
        error = _failure(name, len(progress.token_ids), output) if reason == "error" else None
        delta = completion.advance(progress, reason, output.logprobs.get(name), error)
        completion.sink.append(delta)
        self.num_generated_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.drop(completion)

    def abandon(self) -> None:
        """Forget the steps in flight; all requests are dropped already."""
        while self._in_flight:
            self._scheduler().update(self._in_flight.popleft().output, ModelRunnerOutput())

    def check_integrity(self) -> None:
        """Scheduler, grammars and completions agree on what is there."""
        scheduler = self._scheduler()
        scheduler.check_integrity()
        stats = scheduler.stats()
        if len(self.live) != stats["num_running"] + stats["num_waiting"]:
            raise IntegrityError(f"the engine has {len(self.live)} completions to make, the scheduler {dict(stats)}")
        structured = sum(completion.is_structured for completion in self.live)
        if len(self._grammars) != structured:
            raise IntegrityError(f"{structured} completions are structured, and {len(self._grammars)} grammars kept")


def in_words(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}"


def _failure(name: str, position: int, output: ModelRunnerOutput) -> str:
    """Why the scheduler ended a request at that token of a step."""
    token = output.sampled_token_ids[output.req_ids.index(name)][position]
    if token == -1:
        return "no token was possible: the logits were not finite, or every token was banned"
    return f"the worker returned token {token}, which is outside the vocabulary"
