"""What scheduler and worker see of a request's parameters: a seed, and bad words as token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from random import Random

import attrs

from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.interfaces.text import Tokenizer


def resolve(params: SamplingParams, tokenizer: Tokenizer, random: Random) -> SamplingParams:
    """A request that is preempted goes on with the same random numbers: one without a seed gets one from `random`."""
    if params.seed is None:
        params = attrs.evolve(params, seed=random.getrandbits(63))
    if params.logprob_token_ids and params.logprobs is None:
        params = attrs.evolve(params, logprobs=0)  # whoever asks for chosen ids asks for logprobs
    if params.bad_words:
        ids = (*params.bad_words_token_ids, *bad_word_ids(params.bad_words, tokenizer))
        params = attrs.evolve(params, bad_words_token_ids=tuple(dict.fromkeys(ids)))
    return params


def of_completion(params: SamplingParams, index: int) -> SamplingParams:
    """Completion 0 is what n=1 would give. Seeds of the others have nothing to do with those near the request's."""
    if index == 0:
        return params if params.n == 1 else attrs.evolve(params, n=1)
    digest = hashlib.blake2b(f"{params.seed}/{index}".encode(), digest_size=8).digest()
    return attrs.evolve(params, n=1, seed=int.from_bytes(digest, "big") >> 1)


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as it is written at the beginning of a text and after a space."""
    spellings = (space + word.lstrip() for word in words for space in ("", " "))
    ids = (tuple(tokenizer.encode(spelling, add_special_tokens=False)) for spelling in spellings)
    return tuple(dict.fromkeys(filter(None, ids)))
