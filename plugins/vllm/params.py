"""vLLM's SamplingParams as ours. What this worker does not serve is refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import numpy as np

from workerkit.framework.interfaces.sampling_params import SamplingParams, StructuredOutputsParams

_SAME = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
)
_TRANSLATED = frozenset(
    {
        "top_k",
        "seed",
        "logit_bias",
        "allowed_token_ids",
        "_bad_words_token_ids",
        "logprob_token_ids",
        "structured_outputs",
        "extra_args",
        "_all_stop_token_ids",
    }
)
# vLLM's front end and scheduler serve these; the worker need not know.
_ELSEWHERE = frozenset(
    {
        "n",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "max_tokens",
        "flat_logprobs",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "output_kind",
        "stream_interval",
        "skip_clone",
        "output_text_buffer_length",
        "_eos_token_id",
        "bad_words",
        "skip_reading_prefix_cache",
        "repetition_detection",
        "watermarking",  # means nothing unless the server is configured for it, which is refused
        "_watermarking_skipped",
    }
)
_KNOWN = frozenset(_SAME) | _TRANSLATED | _ELSEWHERE
# Ours that vLLM has no field for: requests give them in `extra_args` (`vllm_xargs` of the HTTP API).
_OURS = ("typical_p", "top_n_sigma")
# vLLM's engine compiles the grammar; all that the worker must know is that masks will come.
_STRUCTURED = StructuredOutputsParams(grammar="compiled by vLLM")


def unserved(params: Any) -> Iterator[str]:
    """Fields of vLLM's params that are set and that nothing here serves; those of later versions included."""
    untouched = type(params)()
    for name in type(params).__struct_fields__:
        value = getattr(params, name)
        if name not in _KNOWN and (isinstance(value, np.ndarray) or value != getattr(untouched, name)):
            yield name


def served_extra_args(parameters: Iterable[str]) -> frozenset[str]:
    """Keys of `extra_args` that the parts of a worker read, given the `parameters` of all."""
    return frozenset({*_OURS, *(set(parameters) - set(attrs.fields_dict(SamplingParams)))})


def sampling_params(params: Any, seed: int) -> SamplingParams:
    """vLLM's params (already completed by its front end) as ours. `seed`: for a request that brings none.

    Raises ValueError or TypeError for values that ours may not have.
    """
    extra, structured = dict(params.extra_args or {}), params.structured_outputs
    logprobs = params.logprobs
    if params.logprob_token_ids and logprobs is None:
        logprobs = 0  # whoever asks for chosen ids asks for logprobs
    fields = {name: getattr(params, name) for name in _SAME} | {"logprobs": logprobs}
    return SamplingParams(
        **fields,
        **{name: extra.pop(name) for name in _OURS if name in extra},
        top_k=max(params.top_k, 0),  # -1 is off, too
        seed=seed if params.seed is None else params.seed % 2**63,
        logit_bias=params.logit_bias or {},
        allowed_token_ids=tuple(params.allowed_token_ids) if params.allowed_token_ids else None,
        bad_words_token_ids=tuple(map(tuple, params.bad_words_token_ids or ())),
        logprob_token_ids=tuple(params.logprob_token_ids or ()),
        structured_outputs=None if structured is None or structured.all_constraints_none() else _STRUCTURED,
        extra_args=extra,
    )
