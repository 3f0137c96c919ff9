"""What a sampler refuses of a request, by name, before the request is admitted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from workerkit.framework.errors import did_you_mean
from workerkit.framework.interfaces.sampling import SamplerStage
from workerkit.framework.interfaces.sampling_params import SamplingParams

# Parameters that only a stage can serve, and the values of each that ask for nothing.
_ASKS_FOR_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "temperature": (0.0, 1.0),
    "top_k": (0,),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "top_n_sigma": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_tokens": (0,),
    "bad_words": ((),),
    "bad_words_token_ids": ((),),
    "allowed_token_ids": (None,),
    "logit_bias": ({},),
}
_FIELDS = frozenset(attrs.fields_dict(SamplingParams))


def unserved(params: SamplingParams, stages: Sequence[SamplerStage]) -> Iterator[str]:
    """Parameters of a request, the sampler's defaults filled in, that no stage of the sampler reads."""
    served = {name for stage in stages for name in stage.parameters}
    for name, nothing in _ASKS_FOR_NOTHING.items():
        if name not in served and getattr(params, name) not in nothing:
            yield f"{name}: no stage of the sampler serves it (components.sampler.stages)"
    own = served - _FIELDS
    for name in params.extra_args:
        if name in _FIELDS:
            yield f"extra_args: {name!r} is a sampling parameter of its own"
        elif name not in own:
            yield f"extra_args: no stage of the sampler reads {name!r}; {did_you_mean(name, own)}"


def out_of_vocabulary(params: SamplingParams, vocab_size: int) -> Iterator[str]:
    """Token ids that the model does not have, and more log-probabilities than it has tokens.

    The bound is the model's vocabulary, which may be larger than what its tokenizer calls its own (added tokens).
    """
    ids: Mapping[str, Iterable[int]] = {
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": params.logit_bias,
        "bad_words_token_ids": [token for word in params.bad_words_token_ids for token in word],
        "logprob_token_ids": params.logprob_token_ids,
        "stop_token_ids": params.stop_token_ids,
    }
    for name, values in ids.items():
        if wrong := [token for token in values if token >= vocab_size]:
            yield f"{name}: token id {wrong[0]} is not in the model's vocabulary, 0 to {vocab_size - 1}"
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > vocab_size:
            yield f"{name}: {getattr(params, name)} is more than the vocabulary's {vocab_size} tokens; -1 asks for all"
