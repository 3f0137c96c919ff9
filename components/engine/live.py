"""The engine's side of requests: their completions while they run, and what has come of them so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator, Sequence

import attrs

from workerkit.components.engine.logprobs import PromptPieces, token_logprobs
from workerkit.components.engine.stop import StopStrings
from workerkit.framework.interfaces.engine import (
    Completion,
    FinishReason,
    Progress,
    PromptLogprobs,
    RequestDelta,
    TokenLogprobs,
)
from workerkit.framework.interfaces.request import Logprobs
from workerkit.framework.interfaces.text import Detokenizer


@attrs.define(eq=False, kw_only=True)
class LiveCompletion:
    """A completion that is not finished."""

    name: str  # towards scheduler and worker
    req_id: str
    index: int  # which of the request's n completions
    detokenizer: Detokenizer
    stop: StopStrings
    sink: deque[RequestDelta]  # of the call that waits for it
    is_structured: bool
    wants_logprobs: bool
    prompt_pieces: PromptPieces | None  # until they are delivered, where they are wanted
    has_begun: bool = False

    def restart(self) -> None:
        """It was preempted: what is not delivered of its prompt is computed anew."""
        if self.prompt_pieces is not None:
            self.prompt_pieces = PromptPieces(self.prompt_pieces.prompt_len)

    def advance(
        self, progress: Progress, reason: FinishReason | None, logprobs: Logprobs | None, error: str | None
    ) -> RequestDelta:
        """What a step comes to for the user. Tokens behind the one that completes a stop string do not count."""
        text, count, stopped = self.stop.push([self.detokenizer.push([token]) for token in progress.token_ids])
        if reason is not None and not stopped:
            rest = self.stop.finish(self.detokenizer.flush())
            text, stopped = text + rest.text, rest.stopped
        if stopped:
            reason, error = "stop", None
        delta = RequestDelta(
            req_id=self.req_id,
            index=self.index,
            token_ids=progress.token_ids[:count],
            text=text,
            logprobs=token_logprobs(logprobs, count) if self.wants_logprobs else None,
            prompt_logprobs=None if self.prompt_pieces is None else self.prompt_pieces.whole(),
            num_cached_tokens=0 if self.has_begun else progress.num_cached_tokens,
            finish_reason=reason,
            error=error,
        )
        self.has_begun, self.prompt_pieces = True, None
        return delta

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """A last delta without tokens."""
        self.sink.append(
            RequestDelta(req_id=self.req_id, index=self.index, token_ids=(), text="", finish_reason=reason, error=error)
        )


class LiveRequests:
    """The completions that are not finished, by name. A request lives until the last of its completions has ended."""

    def __init__(self) -> None:
        self._completions: dict[str, LiveCompletion] = {}
        self._requests: dict[str, list[LiveCompletion]] = {}
        self._with_prompts: dict[str, LiveCompletion] = {}  # those that want log-probabilities of theirs

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._requests

    def __len__(self) -> int:
        return len(self._completions)

    def __getitem__(self, name: str) -> LiveCompletion:
        return self._completions[name]

    def __iter__(self) -> Iterator[LiveCompletion]:
        return iter(tuple(self._completions.values()))

    def of(self, req_id: str) -> Sequence[LiveCompletion]:
        """Those of a request; none for an unknown one."""
        return tuple(self._requests.get(req_id, ()))

    def prompt_pieces(self, names: Container[str]) -> dict[str, PromptPieces]:
        """Where the log-probabilities of prompts go, of those in `names` that still wait for them."""
        return {
            name: completion.prompt_pieces
            for name, completion in self._with_prompts.items()
            if completion.prompt_pieces is not None and name in names
        }

    def names(self, req_id: str, n: int) -> list[str]:
        """Names for the n completions of a request: a single one is called like it. Whatever ids users choose, a name
        belongs to one completion."""
        wanted = [req_id] if n == 1 else [f"{req_id}/{index}" for index in range(n)]
        return [self._unused(name) for name in wanted]

    def _unused(self, name: str) -> str:
        while name in self._completions:
            name += "'"
        return name

    def add(self, completions: Sequence[LiveCompletion]) -> None:
        """Those of one request."""
        self._completions.update({completion.name: completion for completion in completions})
        self._with_prompts.update({c.name: c for c in completions if c.prompt_pieces is not None})
        self._requests[completions[0].req_id] = list(completions)

    def remove(self, completion: LiveCompletion) -> None:
        """It has ended."""
        del self._completions[completion.name]
        self._with_prompts.pop(completion.name, None)
        siblings = self._requests[completion.req_id]
        siblings.remove(completion)
        if not siblings:
            del self._requests[completion.req_id]


@attrs.define(kw_only=True)
class GrowingCompletion:
    """What has come of one completion so far."""

    req_id: str
    position: int  # of the prompt in its call
    index: int = 0
    prompt_token_ids: tuple[int, ...] = ()
    token_ids: list[int] = attrs.field(factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int = 0

    def add(self, delta: RequestDelta) -> None:
        """One more delta."""
        self.token_ids.extend(delta.token_ids)
        self.text += delta.text
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.extend(delta.logprobs)
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.num_cached_tokens += delta.num_cached_tokens

    def completion(self, reason: FinishReason, error: str | None) -> Completion:
        """The finished one."""
        return Completion(
            req_id=self.req_id,
            index=self.index,
            prompt_token_ids=self.prompt_token_ids,
            token_ids=tuple(self.token_ids),
            text=self.text,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            finish_reason=reason,
            error=error,
        )
