"""The standalone engine: scheduling, text, and the loop around one worker."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs

from workerkit.framework.interfaces.kv_cache import KVLayout
from workerkit.framework.interfaces.request import ImageInput, ModelRunnerOutput, SchedulerOutput
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.interfaces.text import Tokenizer

FinishReason = Literal["stop", "length", "abort", "error"]


@attrs.frozen(kw_only=True)
class PromptInputs:
    """A prompt, and what else it consists of."""

    prompt: str | Sequence[int]
    images: tuple[bytes, ...] = ()  # picture files, in the order of their places in the prompt
    lora: str | None = None  # name of an adapter


Prompt = str | Sequence[int] | PromptInputs  # text, or token ids, or with more to it


@attrs.frozen(kw_only=True)
class MultimodalSpan:
    """Prompt positions whose embeddings come from an image or the like, not from their token."""

    start: int
    length: int
    digest: str  # of the content


@attrs.frozen(kw_only=True)
class CacheIdentity:
    """What a request's keys and values depend on besides tokens. Blocks are shared only where all of it is equal."""

    salt: str | None = None  # keeps users apart who must not learn of each other's prompts from timing
    lora: str | None = None  # what identifies the adapter's weights: not its name, which may be given twice
    multimodal: tuple[MultimodalSpan, ...] = ()


@attrs.frozen(kw_only=True)
class EngineRequest:
    """One sequence to be scheduled."""

    req_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()  # every token that ends it, the model's own included
    priority: int = 0  # lower comes first, where the scheduler goes by priority
    cache_identity: CacheIdentity = CacheIdentity()
    images: tuple[ImageInput, ...] = ()  # cache_identity has their spans
    lora: str | None = None  # name of the adapter; cache_identity has what identifies its weights


@attrs.frozen(kw_only=True, slots=False)  # one for each request and step: quicker to build
class Progress:
    """What a step added to a scheduled request."""

    token_ids: tuple[int, ...]  # those that count: a stop id does not
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache when it was first admitted


@attrs.frozen(kw_only=True)
class TokenLogprobs:
    """One position: the token that is there, and the ones that were asked for."""

    token_id: int
    logprob: float
    rank: int  # 1 + how many tokens are more likely
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), most likely first
    chosen: tuple[tuple[int, float], ...] = ()  # of SamplingParams.logprob_token_ids


PromptLogprobs = tuple[
    TokenLogprobs | None, ...
]  # one entry a prompt token; None for the first, which nothing predicts


@attrs.frozen(kw_only=True, slots=False)  # one for each request and step: quicker to build
class RequestDelta:
    """What one step added to one completion of a request."""

    req_id: str
    index: int = 0  # which of the request's n completions
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one a token
    prompt_logprobs: PromptLogprobs | None = None  # exactly once, with the first token
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None  # with finish_reason "error"


@attrs.frozen(kw_only=True)
class Completion:
    """A finished completion."""

    req_id: str
    index: int = 0  # which of the request's n completions
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # without the token that stopped it, unless that is a stop string's
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one a token
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    finish_reason: FinishReason
    error: str | None = None


@attrs.frozen(kw_only=True)
class EngineStats:
    """Counts since the engine started."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0  # each prompt once, for each of its n completions
    num_cached_tokens: int = 0  # of these, found in the prefix cache when the request was first admitted
    num_generated_tokens: int = 0
    num_drafts: int = 0  # how often a request verified drafts in a step; placeholders are none
    num_draft_tokens: int = 0  # the drafts that these verified
    num_accepted_tokens: int = 0  # the drafts of these that were accepted, also those behind the end of a request
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0


class Scheduler(abc.ABC):
    """Decides what each step computes: continuous batching, chunked prefill, preemption by recomputation."""

    @classmethod
    def plans_ahead(cls, config: Any) -> bool:
        """Whether, with that config, a step is planned before the tokens of the one before are known."""
        return False

    @property
    @abc.abstractmethod
    def max_in_flight(self) -> int:
        """How many outputs may be scheduled before the oldest must be updated: 1, or 2 with asynchronous scheduling."""

    @abc.abstractmethod
    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError when its id is in use or when it can never fit."""

    @abc.abstractmethod
    def abort(self, req_id: str) -> bool:
        """Drop a request wherever it is; False when unknown. Its blocks are free at once or after the running step."""

    @abc.abstractmethod
    def reset_prefix_cache(self) -> None:
        """Drop the content of all cached blocks. Running requests keep theirs, but share nothing that builds on it."""

    @abc.abstractmethod
    def schedule(self) -> SchedulerOutput:
        """The next step; empty when there is nothing to do."""

    @abc.abstractmethod
    def update(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> Mapping[str, Progress]:
        """Take a step's tokens. What became of each request that got some."""

    @property
    @abc.abstractmethod
    def has_requests(self) -> bool:
        """Waiting or running ones."""

    @property
    @abc.abstractmethod
    def has_work(self) -> bool:
        """Whether `schedule` would return anything, finished ids that the worker must hear of included."""

    @abc.abstractmethod
    def stats(self) -> Mapping[str, int]:
        """num_running, num_waiting, num_free_blocks, num_preemptions, num_cached_tokens, and with speculation
        num_drafts, num_draft_tokens, num_accepted_tokens: see EngineStats."""

    @abc.abstractmethod
    def check_integrity(self) -> None:
        """Raise IntegrityError when a block is owned twice, lost, or held by a request that is gone."""


class Engine(abc.ABC):
    """One worker with a scheduler and a tokenizer in front."""

    @abc.abstractmethod
    def start(self, progress: bool = False) -> None:
        """Start the worker and get ready for requests."""

    @abc.abstractmethod
    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        req_id: str | None = None,
        *,
        priority: int = 0,
        cache_identity: CacheIdentity | None = None,
    ) -> str:
        """Queue a prompt and return its id. Raises RequestError: empty, longer than the context, id in use, a grammar
        that cannot be compiled, …"""

    @abc.abstractmethod
    def abort(self, req_id: str) -> None:
        """Drop a request; unknown ids are ignored."""

    @abc.abstractmethod
    def reset_prefix_cache(self) -> None:
        """Forget every block that was kept for later requests. Nothing changes for those that run. Needed when what
        the cache was computed with changes (weights, say); after the worker has slept the engine does it itself."""

    @abc.abstractmethod
    def step(self) -> list[RequestDelta]:
        """Run one step (or collect one, with asynchronous scheduling) and return what it added."""

    @abc.abstractmethod
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_progress: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        """Complete all prompts, in their order; one with n > 1 has its n completions one after another. A prompt that
        is refused yields finish_reason "error" in its place, once.

        On KeyboardInterrupt the unfinished ones among them are aborted before it is raised again.
        """

    @abc.abstractmethod
    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestDelta]:
        """Deltas of one prompt; closing the iterator aborts it."""

    @abc.abstractmethod
    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, lora: str | None = None
    ) -> Iterator[RequestDelta]:
        """`stream` of a conversation through the chat template, with an adapter if one is named."""

    @property
    @abc.abstractmethod
    def has_unfinished(self) -> bool: ...

    @property
    @abc.abstractmethod
    def stats(self) -> EngineStats: ...

    @property
    @abc.abstractmethod
    def tokenizer(self) -> Tokenizer: ...

    @property
    @abc.abstractmethod
    def shape(self) -> WorkerShape: ...

    @property
    @abc.abstractmethod
    def layout(self) -> KVLayout: ...

    @abc.abstractmethod
    def check_integrity(self) -> None:
        """Everything stateful, worker included."""

    @abc.abstractmethod
    def shutdown(self) -> None: ...
