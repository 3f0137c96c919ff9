"""The standalone engine: scheduling, text, and the loop around one worker."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs

from workerkit.framework.interfaces.kv_cache import KVLayout
from workerkit.framework.interfaces.request import ModelRunnerOutput, SamplingParams, SchedulerOutput
from workerkit.framework.interfaces.runner import WorkerShape

FinishReason = Literal["stop", "length", "abort", "error"]
Prompt = str | Sequence[int]  # text, or token ids


@attrs.frozen(kw_only=True)
class RequestDelta:
    """What one step added to a request."""

    req_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    error: str | None = None  # with finish_reason "error"


@attrs.frozen(kw_only=True)
class Completion:
    """A finished request."""

    req_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # without the token that stopped it, unless that is a stop string's
    text: str
    finish_reason: FinishReason
    error: str | None = None


@attrs.frozen(kw_only=True)
class EngineStats:
    """Counts since the engine started."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0


class Scheduler(abc.ABC):
    """Decides what each step computes: continuous batching, chunked prefill, preemption by recomputation."""

    @property
    @abc.abstractmethod
    def max_in_flight(self) -> int:
        """How many outputs may be scheduled before the oldest must be updated: 1, or 2 with asynchronous scheduling."""

    @abc.abstractmethod
    def add(
        self, req_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, stop_ids: frozenset[int]
    ) -> None:
        """Queue a request. Raises RequestError when it can never fit."""

    @abc.abstractmethod
    def abort(self, req_id: str) -> bool:
        """Drop a request wherever it is; False when unknown. Its blocks are free at once or after the running step."""

    @abc.abstractmethod
    def schedule(self) -> SchedulerOutput:
        """The next step; empty when there is nothing to do."""

    @abc.abstractmethod
    def update(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput
    ) -> Mapping[str, tuple[tuple[int, ...], FinishReason | None]]:
        """Take a step's tokens. For each request that got some: (the tokens that count, why it ended or None)."""

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
        """num_running, num_waiting, num_free_blocks, num_preemptions."""

    @abc.abstractmethod
    def check_integrity(self) -> None:
        """Raise IntegrityError when a block is owned twice, lost, or held by a request that is gone."""


class Detokenizer(abc.ABC):
    """Text of one request, token by token."""

    @abc.abstractmethod
    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is certain now; bytes of an unfinished character are held back."""

    @abc.abstractmethod
    def flush(self) -> str:
        """What was held back; an unfinished character becomes U+FFFD."""


class Tokenizer(abc.ABC):
    """Text to ids and back."""

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Added tokens included."""

    @property
    @abc.abstractmethod
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    @abc.abstractmethod
    def bos_token(self) -> str: ...

    @property
    @abc.abstractmethod
    def eos_token(self) -> str: ...

    @property
    @abc.abstractmethod
    def chat_template(self) -> str | None:
        """The jinja source that came with the model."""

    @abc.abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    @abc.abstractmethod
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    @abc.abstractmethod
    def detokenizer(self, prompt_token_ids: Sequence[int]) -> Detokenizer:
        """Starts after the prompt, whose last bytes may be half a character."""


class ChatTemplate(abc.ABC):
    """Messages to prompt text."""

    @abc.abstractmethod
    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Raises RequestError for a template's own refusal, UnsupportedError when the model has no template."""


class Engine(abc.ABC):
    """One worker with a scheduler and a tokenizer in front."""

    @abc.abstractmethod
    def start(self, progress: bool = False) -> None:
        """Start the worker and get ready for requests."""

    @abc.abstractmethod
    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, req_id: str | None = None) -> str:
        """Queue a prompt and return its id. Raises RequestError: empty, longer than the context, id in use, …"""

    @abc.abstractmethod
    def abort(self, req_id: str) -> None:
        """Drop a request; unknown ids are ignored."""

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
        """Complete all prompts, in their order. A prompt that is refused yields finish_reason "error" in its place.

        On KeyboardInterrupt the unfinished ones among them are aborted before it is raised again.
        """

    @abc.abstractmethod
    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestDelta]:
        """Deltas of one prompt; closing the iterator aborts it."""

    @abc.abstractmethod
    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None
    ) -> Iterator[RequestDelta]:
        """`stream` of a conversation through the chat template."""

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
