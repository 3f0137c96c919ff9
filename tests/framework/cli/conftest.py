"""The command line over a registry whose engine is a script: no model, no worker."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import pytest

from workerkit.framework import roles
from workerkit.framework.cli.main import main
from workerkit.framework.errors import RequestError
from workerkit.framework.interfaces.engine import Engine, EngineStats, Prompt, RequestDelta, TokenLogprobs
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.interfaces.sections import ModelSection
from workerkit.framework.interfaces.text import ChatTemplate, Tokenizer
from workerkit.framework.plugins import Plugins, load_plugins
from workerkit.framework.registry import Registry
from workerkit.framework.testing.fakes_text import FakeChatTemplate, FakeTokenizer


@attrs.frozen(kw_only=True)
class ScriptConfig:
    ctrl_c_at_step: int | None = None
    eager: bool = True
    drafts_a_step: int = 0


class ScriptedEngine(Engine):
    """Answers a text with itself in capitals, a character a step; `!` in it is an error in mid-answer. Completion i
    leaves out the first i characters; log-probabilities are minus the character's number, the other is impossible."""

    last: list[ScriptedEngine]

    def __init__(self, config: ScriptConfig, model: ModelSection, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.config, self.model, self._tokenizer, self._template = config, model, tokenizer, template
        self.calls: list[str] = []
        self.asked: list[tuple[Prompt, SamplingParams]] = []
        self.messages: list[Sequence[Mapping[str, Any]]] = []
        self.aborted: list[str] = []
        self._left: dict[tuple[str, int], str] = {}
        self._logprobs: set[str] = set()
        self._steps = 0
        self.last.append(self)

    def start(self, progress: bool = False) -> None:
        self.calls.append(f"start(progress={progress})")

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, req_id: str | None = None, **_: Any
    ) -> str:
        assert params is not None
        text = prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)
        if not text:
            raise RequestError("the prompt is empty")
        self.asked.append((prompt, params))
        req_id = f"r{len(self.asked)}"
        for index in range(params.n):
            self._left[req_id, index] = text.upper()[index : params.max_tokens]
        if params.logprobs is not None:
            self._logprobs.add(req_id)
        return req_id

    def abort(self, req_id: str) -> None:
        self.aborted.append(req_id)
        self._left = {key: left for key, left in self._left.items() if key[0] != req_id}

    def reset_prefix_cache(self) -> None:
        raise AssertionError("the command line does not call it")

    def step(self) -> list[RequestDelta]:
        self._steps += 1
        if self._steps == self.config.ctrl_c_at_step:
            signal.raise_signal(signal.SIGINT)
        deltas = []
        for (req_id, index), left in list(self._left.items()):
            char, rest = left[0], left[1:]
            self._left[req_id, index] = rest
            reason: Any = "error" if char == "!" else None if rest else "length"
            error = "a bad character" if char == "!" else None
            if reason:
                del self._left[req_id, index]
            ids = () if error else (ord(char),)
            text = "" if error else char
            top = ((ids[0], float(-ids[0])), (0, float("-inf"))) if ids else ()
            deltas.append(
                RequestDelta(
                    req_id=req_id,
                    index=index,
                    token_ids=ids,
                    text=text,
                    logprobs=tuple(TokenLogprobs(token_id=i, logprob=float(-i), rank=1, top=top) for i in ids)
                    if req_id in self._logprobs
                    else None,
                    finish_reason=reason,
                    error=error,
                )
            )
        return deltas

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestDelta]:
        req_id = self.add_request(prompt, params)
        try:
            while (req_id, 0) in self._left:
                yield from self.step()
        finally:
            if (req_id, 0) in self._left:
                self.abort(req_id)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, lora: str | None = None
    ) -> Iterator[RequestDelta]:
        self.messages.append(list(messages))
        return self.stream(messages[-1]["content"], params)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def generate(self, prompts: Any, params: Any = None, on_progress: Any = None) -> Any:
        raise AssertionError("the command line does not call it")

    has_unfinished = shape = layout = property(lambda self: None)

    @property
    def stats(self) -> EngineStats:
        drafts = self.config.drafts_a_step * self._steps
        return EngineStats(num_drafts=drafts, num_draft_tokens=3 * drafts, num_accepted_tokens=drafts // 2)

    def check_integrity(self) -> None:
        assert not self._left


@pytest.fixture
def engines() -> list[ScriptedEngine]:
    """The engines that were built, in order."""
    return []


@pytest.fixture
def scripted(engines: list[ScriptedEngine]) -> Plugins:
    """Plugins of which the engine is a script."""
    registry = Registry()
    registry.sections["model"] = ModelSection
    for role in (roles.TOKENIZER, roles.CHAT_TEMPLATE, roles.ENGINE):
        registry.add_role(role)
    registry.add(roles.TOKENIZER, "file", FakeTokenizer)
    registry.add(roles.CHAT_TEMPLATE, "jinja", FakeChatTemplate)
    registry.add(roles.ENGINE, "standalone", type("Scripted", (ScriptedEngine,), {"last": engines}))
    return Plugins(registry, ())


@pytest.fixture
def installed() -> Plugins:
    """The real ones."""
    return load_plugins()


@pytest.fixture
def cli(scripted: Plugins) -> Callable[..., int]:
    """`main` over the scripted engine."""
    return lambda *argv: main([str(a) for a in argv], scripted)


@pytest.fixture
def real_cli(installed: Plugins) -> Callable[..., int]:
    """`main` over what is installed."""
    return lambda *argv: main([str(a) for a in argv], installed)
