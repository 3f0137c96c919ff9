"""`kernels: {batch_invariant: true}`: in bfloat16 a request's tokens and log-probabilities have the same bits alone, in
any batch, in any chunks, after preemption and prefix hits, on either runner, with and without speculation."""

import random

import numpy as np
import pytest
from letters import EOS, VOCAB, Letters

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.plugins import load_plugins
from workerkit.kernels.cpu.native.build import unavailable

needs_native = pytest.mark.skipif(unavailable() is not None, reason=f"no native kernels here: {unavailable()}")
NUM_REQUESTS = 24
MODELS = {
    "windows": {"sliding_window": 9, "full_attention_interval": 2, "num_attention_heads": 3, "num_key_value_heads": 1},
    "norms": {"qk_norm": True, "qkv_bias": True, "tie_word_embeddings": True, "hidden_size": 96},
}
# Each way to run the same requests: (limits, cache, components).
WAYS = {
    "v1": ({}, {}, {"runner": "v1"}),
    "v2": ({}, {}, {"runner": "v2"}),
    "eagerly": ({}, {}, {"graph": "none"}),
    "chunks": ({"max_num_batched_tokens": 7}, {}, {}),
    "preempted": ({}, {"num_blocks": 40}, {}),
    "ngram": ({"num_speculative_tokens": 3}, {}, {"speculator": {"use": "ngram"}}),
    "target": ({"num_speculative_tokens": 2}, {}, {"runner": "v1", "speculator": "draft_model", "draft": "target"}),
}


def make(model, limits, cache, components, **kernels):
    registry = load_plugins().registry
    registry.add(roles.TOKENIZER, "letters", Letters)
    config = {
        "model": {"source": "random", "max_model_len": 64, "dtype": "bfloat16"},
        "limits": {"max_num_reqs": 8, "max_num_batched_tokens": 48, **limits},
        "cache": {"block_size": 4, "num_blocks": 300, **cache},
        "components": {
            "loader": {"use": "random", "num_hidden_layers": 3, "vocab_size": VOCAB, **model},
            "tokenizer": "letters",
            "kernels": {"batch_invariant": True, **kernels},
            **components,
        },
    }
    return assemble(config, registry=registry)


def requests(seed):
    rng = random.Random(seed)
    shared = [rng.randrange(EOS) for _ in range(20)]
    for number in range(NUM_REQUESTS):
        prompt = shared[: rng.choice([0, 8, 17])] + [rng.randrange(EOS) for _ in range(rng.randint(1, 20))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 2.0]), seed=number, max_tokens=rng.randint(3, 20), ignore_eos=True, logprobs=2
        )
        yield prompt, params


def written(made, prompts, params):
    """Of each request: tokens, and the bits of their log-probabilities."""
    results = made.engine.generate(prompts, params)
    return [
        (result.token_ids, [np.float32(entry.logprob).tobytes() for entry in result.logprobs]) for result in results
    ]


@needs_native
@pytest.mark.parametrize("model", MODELS)
def test_the_same_bits_whatever_the_batch(model):
    prompts, params = (list(part) for part in zip(*requests(len(model)), strict=True))
    with make(MODELS[model], {}, {}, {}) as made:
        made.engine.start()
        alone = [written(made, [prompt], [its])[0] for prompt, its in zip(prompts, params, strict=True)]
    assert len({token for tokens, _ in alone for token in tokens}) > VOCAB // 3, "the texts are dull"
    for way, parts in WAYS.items():
        with make(MODELS[model], *parts) as made:
            made.engine.start()
            together = written(made, prompts, params)
            made.worker.check_integrity()
        for number, (one, other) in enumerate(zip(alone, together, strict=True)):
            assert one == other, f"request {number}, {way}"


def test_what_is_not_invariant_is_refused_by_name():
    with (
        pytest.raises(UnsupportedError, match="no kernel library offers 'linear' that is batch-invariant"),
        make({}, {}, {}, {}, libraries=["cpu", "reference"]) as made,
    ):
        made.engine.start()
