"""V1, V2 and a cache-less forward of the request alone write the same tokens: random arrivals, lengths, aborts and chunk
budgets, over caches so small that requests are preempted all the time. Integrity is checked after every step."""

import random
from collections import Counter

import pytest
import torch
from oracles import dense_logits

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.interfaces.request import SamplingParams

MODEL = {"use": "random", "vocab_size": 61, "num_hidden_layers": 2, "hidden_size": 32}
GAP = 1e-4  # a smaller top-2 gap of the random model's logits decides nothing
TOTAL_STEPS = 2000
ROUNDS = 20


def config(runner, blocks, budget, reqs, window, asynchronous):
    loader = {**MODEL, "sliding_window": window} if window else MODEL
    return {
        "model": {"source": "random", "max_model_len": 48},
        "limits": {"max_num_reqs": reqs, "max_num_batched_tokens": budget},
        "cache": {"block_size": 4, "num_blocks": blocks},
        "components": {
            "runner": runner,
            "loader": loader,
            "sampler": {"use": "torch", "temperature": 0.0},
            "tokenizer": "fake",
            "chat_template": "fake",
            "scheduler": {"use": "continuous", "async_scheduling": asynchronous},
        },
    }
