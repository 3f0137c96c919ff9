"""Sampling of one row, written again in a few lines of numpy: what the runners, in any batch, have to agree with."""

from collections import Counter

import numpy as np

MASK = (1 << 64) - 1
OFF = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "top_n_sigma": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}


def splitmix(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def uniform(seed, position, stream=0):
    """In (0, 1); depends on nothing else."""
    return ((splitmix(splitmix(splitmix(seed) ^ position) ^ stream) >> 12) + 0.5) * 2.0**-52


def ban(x, ids):
    x = x.copy()
    x[list(ids)] = -np.inf
    return x


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def smallest_set(probs, order_key, mass):
    """Ids, best (lowest key) first, until their mass reaches `mass`; what ties with the last one stays."""
    order = np.argsort(order_key, kind="stable")
    last = order[min(int((np.cumsum(probs[order]) < mass).sum()), len(order) - 1)]
    return order_key <= order_key[last]


def process(logits, params, prompt, output, stop_ids=(), allowed=None):
    """float64 [V] -> processed [V]. `params` leaves nothing at None; `allowed` bool [V] is a grammar's mask."""
    x = logits.astype(np.float64)
    if allowed is not None:
        x = np.where(allowed, x, -np.inf)
    if params.allowed_token_ids is not None:
        x = ban(x, set(range(len(x))) - set(params.allowed_token_ids))
    for token, bias in params.logit_bias.items():
        x[token] += bias
    if len(output) < params.min_tokens:
        banned = ban(x, stop_ids)
        x = banned if np.isfinite(banned).any() else x
    for token in {*prompt, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token, count in Counter(output).items():
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    for *before, last in params.bad_words_token_ids:
        if len(before) <= len(output) and list(output[len(output) - len(before) :]) == before:
            x[last] = -np.inf
    if params.temperature == 0 or not np.isfinite(x).any():
        return x
    x /= params.temperature
    if params.top_n_sigma:
        x[x < x.max() - params.top_n_sigma * x[np.isfinite(x)].std()] = -np.inf
    if params.min_p:
        x[x < x.max() + np.log(params.min_p)] = -np.inf
    if 0 < params.top_k < len(x):
        x[x < np.sort(x)[-params.top_k]] = -np.inf
    if params.top_p < 1:
        x[~smallest_set(softmax(x), -x, params.top_p)] = -np.inf
    if params.typical_p < 1:
        probs = softmax(x)
        surprise = np.full_like(x, np.inf)
        surprise[probs > 0] = -np.log(probs[probs > 0])
        entropy = (probs[probs > 0] * surprise[probs > 0]).sum()
        x[~smallest_set(probs, np.abs(surprise - entropy), params.typical_p)] = -np.inf
    return x


def draw(x, params, position):
    """The token, or -1 where none is possible."""
    if not np.isfinite(x.max()):
        return -1
    if params.temperature == 0:
        return int(x.argmax())
    cdf = np.cumsum(softmax(x))
    return int(np.searchsorted(cdf, uniform(params.seed, position) * cdf[-1], side="right"))


def expected(logits, params, prompt, output, stop_ids=(), allowed=None):
    """The next token of a request whose text so far is prompt + output."""
    return draw(process(logits, params, prompt, output, stop_ids, allowed), params, len(prompt) + len(output) - 1)


def possible(logits, params, prompt, output, stop_ids=(), allowed=None, error=1e-5, tries=30):
    """Tokens that rounding errors of that size in the logits could make of it: what a near-tie leaves open."""
    rng = np.random.default_rng(0)
    shaken = (logits + rng.uniform(-error, error, len(logits)) for _ in range(tries))
    return {expected(x, params, prompt, output, stop_ids, allowed) for x in shaken}
