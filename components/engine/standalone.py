"""The standalone engine: one worker, a scheduler in front of it, and text at both ends."""

from __future__ import annotations

import logging
import random
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from numbers import Integral
from typing import Any, cast

import attrs

from workerkit.components.engine.interrupts import interrupts_deferred
from workerkit.components.engine.live import GrowingCompletion, LiveCompletion
from workerkit.components.engine.logprobs import PromptPieces
from workerkit.components.engine.prompt import EncodedPrompt, PromptEncoder, without_pictures
from workerkit.components.engine.resolve import of_completion, resolve
from workerkit.components.engine.steps import Steps, in_words
from workerkit.components.engine.stop import StopStrings
from workerkit.framework.errors import RequestError, StageError, UnsupportedError
from workerkit.framework.interfaces.engine import (
    CacheIdentity,
    Completion,
    Engine,
    EngineRequest,
    EngineStats,
    FinishReason,
    Prompt,
    PromptInputs,
    RequestDelta,
    Scheduler,
)
from workerkit.framework.interfaces.image import ImageProcessor
from workerkit.framework.interfaces.kv_cache import KVLayout
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling_params import SamplingParams, StructuredOutputsParams
from workerkit.framework.interfaces.stages import Later
from workerkit.framework.interfaces.structured import GrammarMatcher, StructuredOutputs
from workerkit.framework.interfaces.text import ChatTemplate, Tokenizer
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
        structured: Later[StructuredOutputs],
        images: Later[ImageProcessor],
    ) -> None:
        self._worker = worker
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._prompts = PromptEncoder(worker, tokenizer, images)
        self._structured = structured  # built for the first request that asks for it
        self._random = random.Random(secrets.randbits(128) if config.seed is None else config.seed)
        self._steps = Steps(worker, scheduler)
        self._live = self._steps.live
        self._outbox: deque[RequestDelta] = deque()  # what the next `step` returns
        self._ids = count()
        self._stopped: BaseException | None = None  # why no step can run any more
        self._num_prompt_tokens = 0

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

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        req_id: str | None = None,
        *,
        priority: int = 0,
        cache_identity: CacheIdentity | None = None,
    ) -> str:
        req_id = self._new_id() if req_id is None else req_id
        self._add(self._prompts.encode(prompt), params, req_id, self._outbox, priority, cache_identity)
        return req_id

    def _new_id(self) -> str:
        return next(name for number in self._ids if (name := f"request-{number}") not in self._live)

    def _add(
        self,
        prompt: EncodedPrompt,
        params: SamplingParams | None,
        req_id: str,
        sink: deque[RequestDelta],
        priority: int = 0,
        cache_identity: CacheIdentity | None = None,
    ) -> None:
        """Queue all completions of a request, or none."""
        self._check_alive()
        token_ids = prompt.token_ids
        if req_id in self._live:
            raise RequestError(f"request id {req_id!r} is in use")
        params = resolve(params or SamplingParams(), self.tokenizer, self._random)
        self._worker.check_request(params)
        eos_ids = () if params.ignore_eos else self.tokenizer.eos_token_ids
        names = self._live.names(req_id, params.n)
        matchers = self._compile(params.structured_outputs, params.n)
        requests = [
            EngineRequest(
                req_id=name,
                prompt_token_ids=tuple(token_ids),
                params=of_completion(params, index),
                stop_ids=frozenset((*params.stop_token_ids, *eos_ids)),
                priority=priority,
                cache_identity=prompt.identity(cache_identity),
                images=prompt.images,
                lora=prompt.lora,
            )
            for index, name in enumerate(names)
        ]
        completions = [
            LiveCompletion(
                name=name,
                req_id=req_id,
                index=index,
                detokenizer=self.tokenizer.detokenizer(token_ids, params.skip_special_tokens),
                stop=StopStrings(params.stop, params.include_stop_str_in_output, params.min_tokens),
                sink=sink,
                is_structured=bool(matchers),
                wants_logprobs=params.logprobs is not None,
                prompt_pieces=None if params.prompt_logprobs is None else PromptPieces(len(token_ids)),
            )
            for index, name in enumerate(names)
        ]
        with interrupts_deferred():
            self._steps.queue(requests, completions, matchers)
            self._num_prompt_tokens += len(token_ids) * params.n

    def _compile(self, wanted: StructuredOutputsParams | None, n: int) -> list[GrammarMatcher]:
        if wanted is None:
            return []
        try:
            return [self._structured().compile(wanted) for _ in range(n)]
        except UnsupportedError as error:
            raise RequestError(f"structured_outputs: {error}") from error

    def abort(self, req_id: str) -> None:
        """The last delta of each unfinished completion says "abort"."""
        with interrupts_deferred():
            for completion in self._live.of(req_id):
                self._steps.drop(completion)
                completion.end("abort")

    def _drop(self, req_ids: Iterable[str]) -> None:
        """Forget requests that nobody waits for, and leave no step of theirs in flight."""
        with interrupts_deferred():
            for req_id in req_ids:
                for completion in self._live.of(req_id):
                    self._steps.drop(completion)
        while self._steps.in_flight:
            self._advance(fill=False)
        if self._stopped is None and self._scheduler().has_work and not self._scheduler().has_requests:
            self._advance()  # the worker has not heard yet that they are gone

    def reset_prefix_cache(self) -> None:
        self._scheduler().reset_prefix_cache()

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
                collected = fill and self._steps.fill()
                if self._steps.in_flight and not collected:
                    self._steps.collect()
            except BaseException as error:
                _log.error("the engine stops: a step failed", exc_info=error)
                self._stopped = error
                self._abort_all("error", in_words(error))
                if not isinstance(error, Exception):
                    raise

    def _abort_all(self, reason: FinishReason, error: str | None = None) -> None:
        for completion in self._live:
            self._steps.drop(completion)
            completion.end(reason, error)
        self._steps.abandon()

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
        if isinstance(prompts, str | PromptInputs) or (
            len(prompts) > 0 and all(isinstance(item, Integral) for item in prompts)
        ):
            prompts = [cast("Prompt", prompts)]
        many = cast("Sequence[Prompt]", prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(many)
        if len(params) != len(many):
            raise RequestError(
                f"{len(many)} prompts came with {len(params)} sampling params: give one for all or one each"
            )
        sink: deque[RequestDelta] = deque()
        waiting: dict[tuple[str, int], GrowingCompletion] = {}
        done: dict[tuple[int, int], Completion] = {}

        def finish(key: tuple[str, int], reason: FinishReason, error: str | None) -> None:
            growing = waiting.pop(key)
            done[growing.position, growing.index] = completion = growing.completion(reason, error)
            if on_progress is not None:
                on_progress(completion)

        try:
            for position, (prompt, its_params) in enumerate(zip(many, params, strict=True)):
                req_id = self._new_id()
                waiting[req_id, 0] = first = GrowingCompletion(req_id=req_id, position=position)
                try:
                    encoded = self._prompts.encode(prompt)
                    first.prompt_token_ids = tuple(encoded.token_ids)
                    for index in range(1, its_params.n):
                        waiting[req_id, index] = attrs.evolve(first, index=index, token_ids=[])
                    self._add(encoded, its_params, req_id, sink)
                except RequestError as error:
                    for index in range(1, its_params.n):
                        waiting.pop((req_id, index), None)
                    finish((req_id, 0), "error", str(error))
            while waiting:
                while not sink:
                    self._advance()
                delta = sink.popleft()
                key = (delta.req_id, delta.index)
                waiting[key].add(delta)
                if delta.finish_reason is not None:
                    finish(key, delta.finish_reason, delta.error)
        finally:
            self._drop({req_id for req_id, _ in waiting})
        return [done[key] for key in sorted(done)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestDelta]:
        """Nothing is queued, and nothing refused, before the first delta is asked for. With n > 1 the deltas of all
        completions come as they are made."""
        sink: deque[RequestDelta] = deque()
        req_id = self._new_id()
        unfinished = 1 if params is None else params.n
        try:
            self._add(self._prompts.encode(prompt), params, req_id, sink)
            while unfinished:
                while not sink:
                    self._advance()
                delta = sink.popleft()
                unfinished -= delta.finish_reason is not None
                yield delta
        finally:
            self._drop([req_id])

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, lora: str | None = None
    ) -> Iterator[RequestDelta]:
        """The template is rendered at once. If it writes the beginning-of-text token, the tokenizer adds no second."""
        plain, pictures = without_pictures(messages)
        text = self._chat_template().render(plain)
        bos = self.tokenizer.bos_token
        template_has_bos = bos != "" and text.startswith(bos)
        token_ids = self.tokenizer.encode(text, add_special_tokens=not template_has_bos)
        return self.stream(PromptInputs(prompt=token_ids, images=pictures, lora=lora), params)

    # What it looks like from outside

    @property
    def has_unfinished(self) -> bool:
        if self._stopped is not None:
            return bool(self._outbox)
        return bool(self._outbox or self._steps.in_flight) or self._scheduler().has_work

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_steps=self._steps.num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._steps.num_generated_tokens,
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
        self._steps.check_integrity()
        self._worker.check_integrity()

    def shutdown(self) -> None:
        """Unfinished requests end with "abort". Can be called at any time, and twice."""
        with interrupts_deferred():
            self._abort_all("abort")
            self._stopped = self._stopped or StageError("it was shut down")
            self._worker.shutdown()
