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
from workerkit.framework.interfaces.engine import ChatTemplate, Engine, Prompt, RequestDelta, Tokenizer
from workerkit.framework.interfaces.request import SamplingParams
from workerkit.framework.interfaces.sections import ModelSection
from workerkit.framework.plugins import Plugins, load_plugins
from workerkit.framework.registry import Registry
from workerkit.framework.testing.fakes_engine import FakeChatTemplate, FakeTokenizer


@attrs.frozen(kw_only=True)
class ScriptConfig:
    ctrl_c_at_step: int | None = None
    eager: bool = True


class ScriptedEngine(Engine):
    """Answers a text with itself in capitals, a character a step; `!` in it is an error in mid-answer."""

    last: list[ScriptedEngine]

    def __init__(self, config: ScriptConfig, model: ModelSection, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.config, self.model, self._tokenizer, self._template = config, model, tokenizer, template
        self.calls: list[str] = []
        self.asked: list[tuple[Prompt, SamplingParams]] = []
        self.messages: list[Sequence[Mapping[str, Any]]] = []
        self.aborted: list[str] = []
        self._left: dict[str, str] = {}
        self._steps = 0
        self.last.append(self)

    def start(self, progress: bool = False) -> None:
        self.calls.append(f"start(progress={progress})")

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, req_id: str | None = None) -> str:
        assert params is not None
        text = prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)
        if not text:
            raise RequestError("the prompt is empty")
        self.asked.append((prompt, params))
        req_id = f"r{len(self.asked)}"
        self._left[req_id] = text.upper()[: params.max_tokens]
        return req_id

    def abort(self, req_id: str) -> None:
        self.aborted.append(req_id)
        self._left.pop(req_id, None)

    def step(self) -> list[RequestDelta]:
        self._steps += 1
        if self._steps == self.config.ctrl_c_at_step:
            signal.raise_signal(signal.SIGINT)
        deltas = []
        for req_id, left in list(self._left.items()):
            char, rest = left[0], left[1:]
            self._left[req_id] = rest
            reason: Any = "error" if char == "!" else None if rest else "length"
            error = "a bad character" if char == "!" else None
            if reason:
                del self._left[req_id]
            ids = () if error else (ord(char),)
            text = "" if error else char
            deltas.append(RequestDelta(req_id=req_id, token_ids=ids, text=text, finish_reason=reason, error=error))
        return deltas

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestDelta]:
        req_id = self.add_request(prompt, params)
        try:
            while req_id in self._left:
                yield from self.step()
        finally:
            if req_id in self._left:
                self.abort(req_id)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None
    ) -> Iterator[RequestDelta]:
        self.messages.append(list(messages))
        return self.stream(messages[-1]["content"], params)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def generate(self, prompts: Any, params: Any = None, on_progress: Any = None) -> Any:
        raise AssertionError("the command line does not call it")

    has_unfinished = stats = shape = layout = property(lambda self: None)

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
