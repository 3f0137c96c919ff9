"""Structured outputs with llguidance: JSON schemas, regular expressions, choices and context-free grammars."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import attrs
from attrs import validators
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from workerkit.components.structured.gbnf import lark_of
from workerkit.components.structured.trial import Trial, Vocabulary, compile_grammar, first_line
from workerkit.framework.errors import RequestError, UnsupportedError
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling_params import StructuredOutputsParams
from workerkit.framework.interfaces.stages import Later
from workerkit.framework.interfaces.structured import GrammarMatcher, StructuredOutputs
from workerkit.framework.interfaces.text import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from llguidance._lib import JsonCompileOptions

_log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class LLGuidanceConfig:
    """Options of `structured_outputs: llguidance`."""

    whitespace: Literal["compact", "flexible"] = attrs.field(
        default="compact",
        validator=validators.in_(("compact", "flexible")),
        metadata={"doc": "between the tokens of JSON: compact, none; flexible, up to 8 characters each time"},
    )
    max_bytes: int = attrs.field(
        default=65536,
        validator=validators.ge(1),
        metadata={"doc": "longest schema, regular expression, grammar or list of choices, in bytes of UTF-8"},
    )
    max_seconds: float = attrs.field(
        default=2.0,
        validator=validators.gt(0),
        metadata={"doc": "longest that compiling one of them may take; the engine waits meanwhile"},
    )


class LLGuidance(StructuredOutputs):
    """Compiles with llguidance; a keyword of JSON schema that it does not know how to enforce is refused.

    Not refused: annotations (title, description, default, examples, contentEncoding, …) and words that are no keyword,
    which a validator ignores too.
    """

    def __init__(self, config: LLGuidanceConfig, tokenizer: Later[Tokenizer], shape: WorkerShape) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._shape = shape

    @functools.cached_property
    def _compiler(self) -> tuple[LLTokenizer, Trial]:
        source = self._tokenizer()
        if not source.eos_token_ids:
            raise UnsupportedError("structured outputs need a tokenizer with an end-of-sequence token")
        vocabulary = Vocabulary(
            [source.token_bytes(token_id) for token_id in range(self._shape.vocab_size)],
            sorted(source.special_token_ids | set(source.eos_token_ids)),
            source.eos_token_ids,
            lambda text: source.encode(text, add_special_tokens=False),
        )
        return vocabulary.build(), Trial(vocabulary, self._config.max_seconds)

    def compile(self, params: StructuredOutputsParams) -> GrammarMatcher:
        field, texts = _given(params)
        tokenizer, trial = self._compiler
        try:
            self._check_size("".join(texts))
            grammar = self._grammar(field, texts)
            trial.run(grammar)
            return LLGuidanceMatcher(compile_grammar(tokenizer, grammar), self._tokenizer().eos_token_ids)
        except ValueError as error:
            raise RequestError(f"structured_outputs.{field}: {error}") from error

    def _check_size(self, text: str) -> None:
        size, limit = len(text.encode()), self._config.max_bytes  # a str may hold lone surrogates: ValueError
        if size > limit:
            raise ValueError(f"{size} bytes are too many; right: at most {limit} (its option max_bytes)")

    def _grammar(self, field: str, texts: tuple[str, ...]) -> str:
        """In llguidance's own form."""
        if field == "choice":
            return LLMatcher.grammar_from_regex("|".join(map(_escaped, texts)))
        (text,) = texts
        if field == "regex":
            return LLMatcher.grammar_from_regex(text)
        if field == "grammar":
            return LLMatcher.grammar_from_lark(lark_of(text))
        schema = '{"type": "object"}' if field == "json_object" else "{}" if text.strip() == "true" else text
        return LLMatcher.grammar_from_json_schema(schema, overrides=self._json_options())

    def _json_options(self) -> JsonCompileOptions:
        """They win over what a schema says of itself (x-guidance)."""
        flexible = self._config.whitespace == "flexible"
        return {
            "whitespace_flexible": flexible,
            "whitespace_pattern": r"[ \n\r\t]{0,8}" if flexible else "",
            "item_separator": ",",
            "key_separator": ":",
            "coerce_one_of": False,
            "lenient": False,
        }


class LLGuidanceMatcher(GrammarMatcher):
    """llguidance reports "stopped" as soon as nothing but the end may follow, not only when the end was seen."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids

    def fill(self, bitmask: np.ndarray, drafts: Sequence[int] = ()) -> None:
        """A grammar that turns out to be too complex here allows nothing: its request fails, and no other."""
        fill_next_token_bitmask(self._matcher, bitmask, 0)
        if self._matcher.is_error():  # llguidance's mask would be the end of the sequence, as if all were well
            _log.warning("a structured request fails: %s", first_line(self._matcher.get_error()))
            bitmask[:] = 0
            return
        if not drafts:
            return
        bitmask[1:] = -1
        ahead = self._matcher.deep_copy()  # a rollback is not possible in every grammar
        for row, draft in enumerate(drafts, 1):
            if ahead.is_stopped() or not ahead.try_consume_tokens([draft]):
                return
            fill_next_token_bitmask(ahead, bitmask, row)

    def accept(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self.is_finished and token_id in self._eos_token_ids:
                continue
            if not self._matcher.try_consume_tokens([token_id]):
                why = first_line(self._matcher.get_error()) or "the grammar does not allow it"
                raise RequestError(f"token {token_id} cannot follow: {why}")

    @property
    def is_finished(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()


def _given(params: StructuredOutputsParams) -> tuple[str, tuple[str, ...]]:
    """(the field that is set, its texts)."""
    for field in ("json", "regex", "grammar"):
        text = getattr(params, field)
        if text is not None:
            return field, (text,)
    return ("choice", params.choice) if params.choice else ("json_object", ("",))


def _escaped(text: str) -> str:
    """A regular expression for this text and no other, whatever characters it is made of."""
    return re.sub(r"[^a-zA-Z0-9]", lambda character: rf"\x{{{ord(character[0]):x}}}", text)
