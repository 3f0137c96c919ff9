"""What a prompt must fulfil before it is queued."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

from workerkit.framework.errors import RequestError


def check_token_ids(prompt_token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """The ids as plain integers. Raises RequestError when there is none, or one that the model does not know."""
    try:
        token_ids = [index(token) for token in prompt_token_ids]
    except TypeError as error:
        raise RequestError(f"a prompt is text or a list of token ids: {error}") from None
    if not token_ids:
        raise RequestError("the prompt is empty: at least one token is needed")
    for position, token in enumerate(token_ids):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"prompt token {token} at position {position} is not in the vocabulary, 0 to {vocab_size - 1}"
            )
    return token_ids


def check_lengths(prompt_len: int, max_tokens: int | None, max_model_len: int) -> int:
    """How long prompt and output may become together. Raises RequestError when the context cannot hold them."""
    if prompt_len >= max_model_len:
        raise RequestError(
            f"the prompt has {prompt_len} tokens, but the context is {max_model_len} (max_model_len), "
            "at least one of them for output"
        )
    if max_tokens is None:
        return max_model_len
    if prompt_len + max_tokens > max_model_len:
        raise RequestError(
            f"the prompt has {prompt_len} tokens and max_tokens is {max_tokens}, "
            f"together more than the context of {max_model_len} (max_model_len)"
        )
    return prompt_len + max_tokens


def check_step(prompt_len: int, budget: int) -> None:
    """Raises RequestError when a prompt does not fit a step, and must not be cut."""
    if prompt_len > budget:
        raise RequestError(
            f"the prompt has {prompt_len} tokens, a step holds {budget} (max_num_batched_tokens) "
            "and chunked_prefill is off"
        )


def check_cache(prompt_len: int, max_len: int, needed: int, num_blocks: int) -> None:
    """Raises RequestError when a request, alone, could need more blocks than there are."""
    if needed > num_blocks:
        raise RequestError(
            f"{prompt_len} prompt tokens and up to {max_len - prompt_len} more need {needed} blocks, "
            f"the whole cache has {num_blocks}"
        )
