"""What a user asks of a request: how it is sampled, what its text must look like, and when it ends."""

from __future__ import annotations

import json as json_library
import numbers
from collections.abc import Mapping
from typing import Any

import attrs
from attrs import validators

FINITE = validators.and_(validators.gt(float("-inf")), validators.lt(float("inf")))
_REAL = validators.instance_of(numbers.Real)
SMALLEST_TEMPERATURE = 1e-5


def _number(*checks: Any) -> Any:
    """None, or a finite number that passes all checks."""
    return attrs.field(default=None, validator=validators.optional(validators.and_(_REAL, FINITE, *checks)))


def _between(low: float, high: float) -> Any:
    return validators.and_(validators.ge(low), validators.le(high))


def _ids(validator: Any = None) -> Any:
    return validators.deep_iterable(validators.ge(0), validator)


def _zero_or_not_tiny(instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if value < 0 or 0 < value < SMALLEST_TEMPERATURE:
        raise ValueError(f"'{attribute.name}' must be 0 (greedy) or >= {SMALLEST_TEMPERATURE}: {value}")


def _schema_text(value: str | Mapping[str, Any] | bool | None) -> str | None:
    return value if value is None or isinstance(value, str) else json_library.dumps(value)


@attrs.frozen(kw_only=True)
class StructuredOutputsParams:
    """What the text of a request must look like. Exactly one field is set."""

    json: str | None = attrs.field(default=None, converter=_schema_text)  # a JSON schema, as text or as a mapping
    json_object: bool = False  # any JSON object
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None  # a context-free grammar in the syntax of Lark, or GBNF's EBNF

    def __attrs_post_init__(self) -> None:
        given = [name for name, value in attrs.asdict(self).items() if value not in (None, False, ())]
        if len(given) != 1:
            raise ValueError(
                "structured_outputs needs exactly one of json, json_object, regex, choice and grammar; "
                f"given: {', '.join(given) or 'none'}"
            )


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How a request is sampled and when it ends. None means: what the worker's sampler is configured to do.

    Names and meanings are those of vLLM's class and of the OpenAI API. Off: top_k 0, top_p 1, min_p 0, typical_p 1,
    top_n_sigma 0, presence and frequency penalty 0, repetition penalty 1. temperature 0 is greedy.
    """

    n: int = attrs.field(default=1, validator=validators.ge(1))  # completions of one prompt
    temperature: float | None = _number(_zero_or_not_tiny)
    top_k: int | None = _number(validators.ge(0))
    top_p: float | None = _number(validators.gt(0.0), validators.le(1.0))
    min_p: float | None = _number(_between(0.0, 1.0))
    typical_p: float | None = _number(validators.gt(0.0), validators.le(1.0))
    top_n_sigma: float | None = _number(validators.ge(0.0))
    presence_penalty: float | None = _number(_between(-2.0, 2.0))
    frequency_penalty: float | None = _number(_between(-2.0, 2.0))
    repetition_penalty: float | None = _number(validators.gt(0.0))
    seed: int | None = _number(validators.ge(0), validators.lt(2**63))
    max_tokens: int | None = _number(validators.ge(1))
    min_tokens: int = attrs.field(default=0, validator=validators.ge(0))
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), validator=_ids())
    stop: tuple[str, ...] = attrs.field(default=(), validator=validators.deep_iterable(validators.min_len(1)))
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    bad_words: tuple[str, ...] = attrs.field(default=(), validator=validators.deep_iterable(validators.min_len(1)))
    bad_words_token_ids: tuple[tuple[int, ...], ...] = attrs.field(
        default=(), validator=validators.deep_iterable(_ids(validators.min_len(1)))
    )
    allowed_token_ids: tuple[int, ...] | None = attrs.field(
        default=None, validator=validators.optional(_ids(validators.min_len(1)))
    )
    logit_bias: Mapping[int, float] = attrs.field(
        factory=dict, validator=validators.deep_mapping(validators.ge(0), FINITE)
    )
    logprobs: int | None = _number(validators.ge(-1))  # most likely tokens to report at each position; -1: all
    logprob_token_ids: tuple[int, ...] = attrs.field(default=(), validator=_ids())  # to report as well
    prompt_logprobs: int | None = _number(validators.ge(-1))
    structured_outputs: StructuredOutputsParams | None = None
    extra_args: Mapping[str, Any] = attrs.field(factory=dict)  # for sampler stages of your own, by stage name

    def __attrs_post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, more than max_tokens: {self.max_tokens}")
