"""The model's own jinja chat template, in a sandbox, with the helpers that transformers gives to templates.

A template comes with the model and is not trusted: it cannot reach Python's internals or change what it is given, and
its loops and output are counted, so that it cannot keep the engine busy.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from workerkit.framework.errors import RequestError, UnsupportedError
from workerkit.framework.interfaces.text import ChatTemplate, Tokenizer

MAX_LOOP_STEPS = 200_000  # of all loops of one rendering together
MAX_CHARACTERS = 10_000_000


class _TemplateRefusal(TemplateError):
    """What a template says through raise_exception."""


class _GenerationTag(Extension):
    """`{% generation %}`…`{% endgeneration %}` marks the assistant's text for training; here it is just the text."""

    tags = {"generation"}  # noqa: RUF012  # the library's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
        self.loop_steps = 0
        self.filters["tojson"] = _tojson  # jinja's own escapes HTML
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        del self.globals["lipsum"]  # makes text of any length

    def count_step(self) -> None:
        self.loop_steps += 1
        if self.loop_steps > MAX_LOOP_STEPS:
            raise SecurityError(f"it loops more than {MAX_LOOP_STEPS} times")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            call = nodes.Call(nodes.EnvironmentAttribute("count_step"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(call).set_lineno(loop.lineno))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or any(isinstance(x, (str, bytes, list, tuple)) for x in (left, right)):
            size = (len(x) if hasattr(x, "__len__") else abs(x) for x in (left, right))
            if max(size) > 100_000:
                raise SecurityError(f"{operator} of this size is not allowed")
        return super().call_binop(context, operator, left, right)


class JinjaChatTemplate(ChatTemplate):
    """Renders what the tokenizer brought along. Compiled once; renderings take turns."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        plain = [_plain_message(number, message) for number, message in enumerate(messages)]
        with self._lock:
            template = self._template
            try:
                return self._render(template, plain, add_generation_prompt)
            except _TemplateRefusal as error:
                raise RequestError(f"the model's chat template refuses these messages: {error}") from error
            except SecurityError as error:
                raise UnsupportedError(f"the model's chat template does what its sandbox forbids: {error}") from error
            except Exception as error:  # a template is a program: anything may go wrong in it
                raise RequestError(f"the model's chat template fails on these messages: {error!r}") from error

    def _render(self, template: jinja2.Template, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        self._sandbox.loop_steps = 0
        parts: list[str] = []
        size = 0
        for part in template.generate(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            bos_token=self._tokenizer.bos_token,
            eos_token=self._tokenizer.eos_token,
        ):
            parts.append(part)
            size += len(part)
            if size > MAX_CHARACTERS:
                raise SecurityError(f"it writes more than {MAX_CHARACTERS} characters")
        return "".join(parts)

    @cached_property
    def _sandbox(self) -> _Sandbox:
        return _Sandbox()

    @cached_property
    def _template(self) -> jinja2.Template:
        source = self._tokenizer.chat_template
        if source is None:
            raise UnsupportedError("the model has no chat template: give it plain prompts, or use a chat model")
        try:
            return self._sandbox.from_string(source)
        except TemplateSyntaxError as error:
            raise UnsupportedError(f"the model's chat template is not valid: line {error.lineno}: {error}") from error


def _plain_message(number: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(
            f"messages[{number}] must be an object with a role, e.g. {{'role': 'user', 'content': 'Hi'}}"
        )
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(message)))  # data only, and the caller's stays as it is
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"messages[{number}] holds something else than text, numbers, lists and objects: {error}"
        ) from error
    return copy


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _TemplateRefusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
