"""V1, V2 and a cache-less forward of the request alone write the same tokens.

Random arrivals, lengths, aborts and chunk budgets of 1 to 64 tokens, over caches so small that requests are preempted
all the time; one or two cache groups, manager blocks of one or two kernel blocks, V2 with and without asynchronous
scheduling, prompts that share prefixes; random sampling parameters: seeds, truncation, penalties, biases, bad words,
grammars, log-probabilities, stops. Each token is worked out again from the request's text alone, by the few lines of
numpy of `sampling_oracle`. Blocks, rows and slots are checked after every step.
"""

import random
from collections import Counter, deque

import attrs
import numpy as np
import pytest
import torch
from half_blocks import HalfBlocks
from letters import EOS, LETTERS, VOCAB, Letters
from oracles import dense_logits
from sampling_oracle import OFF, expected, possible

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.interfaces.engine import CacheIdentity
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.sampling_params import SamplingParams, StructuredOutputsParams
from workerkit.framework.plugins import load_plugins

MIN_STEPS = 5000
MAX_MODEL_LEN = 48
WORDS = ("yes", "no", "maybe", "yesterday", "not", "never")


@attrs.frozen
class Arrival:
    req_id: str
    step: int
    prompt: tuple[int, ...]
    params: SamplingParams
    abort_at: int | None
    priority: int
    salt: str | None


@attrs.frozen
class Scenario:
    seed: int
    budget: int
    max_num_reqs: int
    windows: bool
    half_blocks: bool
    spare_blocks: int
    policy: str
    arrivals: tuple[Arrival, ...]

    @property
    def num_blocks(self) -> int:  # one request of full length, and hardly more
        groups = 2 if self.windows else 1
        return 1 + groups * MAX_MODEL_LEN // 4 + self.spare_blocks


def random_params(rng, room):
    """Every parameter is off most of the time, so that each also meets requests that do not use it."""

    def sometimes(chance, *values):
        return rng.choice(values) if rng.random() < chance else None

    def tokens(most):
        return tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, most)))

    given = {
        "temperature": sometimes(0.6, 0.7, 1.0, 1.5),
        "top_k": sometimes(0.3, 1, 5, 20),
        "top_p": sometimes(0.3, 0.5, 0.9),
        "min_p": sometimes(0.2, 0.05, 0.3),
        "typical_p": sometimes(0.2, 0.5, 0.9),
        "top_n_sigma": sometimes(0.2, 0.5, 1.5),
        "presence_penalty": sometimes(0.2, -1.0, 0.5, 2.0),
        "frequency_penalty": sometimes(0.2, -0.5, 0.3, 1.0),
        "repetition_penalty": sometimes(0.3, 0.8, 1.2, 2.0),
        "logit_bias": sometimes(0.2, {rng.randrange(VOCAB): rng.uniform(-3, 3) for _ in range(3)}),
        "allowed_token_ids": sometimes(0.1, tokens(20)),
        "bad_words_token_ids": sometimes(0.2, tuple(tokens(2) for _ in range(5))),
        "stop_token_ids": sometimes(0.3, tokens(4)),
        "stop": sometimes(0.3, ("a", "Zx"), ("b1", "c", "Qq")),
        "min_tokens": sometimes(0.3, 1, 3, 6),
        "ignore_eos": sometimes(0.3, True),
        "include_stop_str_in_output": sometimes(0.2, True),
        "logprobs": sometimes(0.2, 0, 1, 5, -1),
        "logprob_token_ids": sometimes(0.1, tokens(3)),
        "prompt_logprobs": sometimes(0.1, 0, 2),
        "structured_outputs": sometimes(
            0.2,
            StructuredOutputsParams(choice=WORDS),
            StructuredOutputsParams(regex="[a-e]{2,5}"),
        ),
    }
    given = {name: value for name, value in given.items() if value is not None}
    given["seed"] = rng.randrange(2**63)
    given["max_tokens"] = rng.randint(1, room)
    given["min_tokens"] = min(given.get("min_tokens", 0), given["max_tokens"])
    return SamplingParams(**OFF | given)


def scenario(seed):
    rng = random.Random(seed)
    beginnings = [tuple(rng.randrange(EOS) for _ in range(rng.choice((8, 12, 20)))) for _ in range(3)]
    arrivals = []
    step = 0
    for number in range(rng.randint(10, 24)):
        step += rng.choice((0, 0, 1, 3))
        beginning = rng.choice(beginnings) if rng.random() < 0.6 else ()
        prompt = beginning + tuple(rng.randrange(EOS) for _ in range(rng.randint(0 if beginning else 1, 10)))
        arrival = Arrival(
            req_id=f"r{number}",
            step=step,
            prompt=prompt,
            params=random_params(rng, MAX_MODEL_LEN - len(prompt)),
            abort_at=step + rng.randint(1, 25) if rng.random() < 0.25 else None,
            priority=rng.randrange(3),
            salt=rng.choice((None, None, None, "salt")),
        )
        arrivals.append(arrival)
    return Scenario(
        seed=seed,
        budget=rng.randint(1, 64),
        max_num_reqs=rng.randint(2, 8),
        windows=rng.random() < 0.4,
        half_blocks=rng.random() < 0.3,
        spare_blocks=rng.randint(0, 16),
        policy=rng.choice(("fcfs", "priority")),
        arrivals=tuple(arrivals),
    )


@pytest.fixture(scope="module")
def registry():
    registry = load_plugins().registry
    registry.add(roles.ATTENTION, "half_blocks", HalfBlocks)
    registry.add(roles.TOKENIZER, "letters", Letters)
    return registry


def build(registry, case, runner, asynchronous=False, tables=None):
    loader = {"use": "random", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    if case.windows:
        loader |= {"sliding_window": 6, "full_attention_interval": 2}
    return assemble(
        {
            "model": {"source": "random", "max_model_len": MAX_MODEL_LEN},
            "limits": {"max_num_reqs": case.max_num_reqs, "max_num_batched_tokens": case.budget},
            "cache": {"block_size": 4, "num_blocks": case.num_blocks},
            "components": {
                "runner": runner,
                "loader": loader,
                "attention": "half_blocks" if case.half_blocks else "auto",
                # Every third scenario without native kernels, where there are some.
                "kernels": ["cpu", "reference"] if case.seed % 3 == 0 else "auto",
                "scheduler": {"use": "continuous", "async_scheduling": asynchronous, "policy": case.policy},
                "tokenizer": "letters",
                **({"block_table": tables} if tables else {}),
            },
        },
        registry=registry,
    )


@attrs.define
class Story:
    """What came of one request."""

    token_ids: list[int] = attrs.field(factory=list)
    text: str = ""
    logprobs: list = attrs.field(factory=list)
    prompt_logprobs: tuple | None = None
    reason: str | None = None


def run(assembly, case, counts):
    """request -> its story."""
    engine = assembly.engine
    engine.start()
    stories = {arrival.req_id: Story() for arrival in case.arrivals}
    waiting = deque(case.arrivals)
    now = 0
    while waiting or engine.has_unfinished:
        while waiting and waiting[0].step <= now:
            arrival = waiting.popleft()
            identity = CacheIdentity(salt=arrival.salt)
            engine.add_request(
                arrival.prompt, arrival.params, arrival.req_id, priority=arrival.priority, cache_identity=identity
            )
        for arrival in case.arrivals:
            if arrival.abort_at == now:
                engine.abort(arrival.req_id)
        for delta in engine.step():
            story = stories[delta.req_id]
            story.token_ids += delta.token_ids
            story.text += delta.text
            story.logprobs += delta.logprobs or ()
            if delta.prompt_logprobs is not None:
                assert story.prompt_logprobs is None  # once
                story.prompt_logprobs = delta.prompt_logprobs
            if delta.finish_reason is not None:
                story.reason = delta.finish_reason
        engine.check_integrity()
        now += 1
    stats = engine.stats
    assert assembly.get(roles.RUNNER).num_requests == 0
    assert stats.num_free_blocks == case.num_blocks - 1
    counts["steps"] += stats.num_steps
    counts["preemptions"] += stats.num_preemptions
    counts["cached tokens"] += stats.num_cached_tokens
    counts["aborts"] += sum(story.reason == "abort" for story in stories.values())
    if hasattr(assembly.get(roles.INPUT_BATCH), "row_moves"):
        counts["row moves"] += assembly.get(roles.INPUT_BATCH).row_moves
    return stories


def allowed_next(params, output):
    """The grammar's mask, worked out again: (bool [V] or None, whether only the end may follow)."""
    if params.structured_outputs is None:
        return None, False
    text = Letters().decode(output)
    mask = np.zeros(VOCAB, bool)
    if params.structured_outputs.choice:
        rest = [word[len(text) :] for word in WORDS if word.startswith(text)]
        mask[[LETTERS.index(word[0]) for word in rest if word]] = True
        mask[EOS] = "" in rest
    else:
        mask[:5] = len(text) < 5
        mask[EOS] = len(text) >= 2
    return mask, not mask[:EOS].any()


def check_alone(network, case, arrival, story, counts):
    """Tokens, reason, text and log-probabilities follow from the request's own text."""
    params, prompt, ours = arrival.params, arrival.prompt, story.token_ids
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    logits = dense_logits(network, [*prompt, *ours], len(prompt)).double().numpy()
    where = f"scenario {case.seed}, {arrival.req_id}"
    ended = None
    for index in range(len(ours) + 1):
        output = ours[:index]
        mask, only_end = allowed_next(params, output)
        if index and ended is None and index < len(ours):
            ended = reason_to_end(params, output, only_end, arrival)
            assert ended is None, f"{where}: goes on after {ended} at {index}"
        if index == len(ours):
            break
        row = logits[len(prompt) - 1 + index]
        token = expected(row, params, prompt, output, stop_ids, mask)
        if token != ours[index]:
            assert ours[index] in possible(row, params, prompt, output, stop_ids, mask), f"{where}: token {index}"
            counts["near ties"] += 1
        counts["tokens alone"] += 1
    if story.reason == "abort":
        return
    counts[f"ended by {story.reason}"] += 1
    mask, only_end = allowed_next(params, ours)
    reason = reason_to_end(params, ours, only_end, arrival) if ours else None
    if reason is None:  # then the next token is one that is not shown
        row = logits[len(prompt) - 1 + len(ours)]
        unseen = {expected(row, params, prompt, ours, stop_ids, mask)}
        if not unseen & {*stop_ids, -1}:
            unseen = possible(row, params, prompt, ours, stop_ids, mask)
            counts["near ties"] += 1
        reason = "stop" if unseen & stop_ids else "error" if -1 in unseen else f"none: {unseen}"
    assert story.reason == reason, where
    check_text(params, story, where)
    check_logprobs(params, prompt, story, logits, where, counts)


def reason_to_end(params, output, only_end, arrival):
    """Why a request ends after these tokens, or None."""
    text = Letters().decode(output)
    watched = Letters().decode(output[params.min_tokens :]) if params.min_tokens else text
    if params.structured_outputs is not None and (only_end or output[-1] == EOS):
        return "stop"  # the text is complete; with ignore_eos the end is a token like others, and the last one
    if any(stop in watched for stop in params.stop):
        return "stop"
    if len(output) >= params.max_tokens:
        return "length"
    return None


def check_text(params, story, where):
    text = Letters().decode(story.token_ids)
    starts = [(text.find(stop, max(params.min_tokens, 0)), stop) for stop in params.stop]
    starts = [(start, stop) for start, stop in starts if start >= 0]
    if starts and story.reason == "stop":
        start, stop = min(starts)
        text = text[: start + len(stop)] if params.include_stop_str_in_output else text[:start]
    assert story.text == text, where


def check_logprobs(params, prompt, story, logits, where, counts):
    normalised = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    normalised -= logits.max(-1, keepdims=True)
    asked = params.logprobs is not None or params.logprob_token_ids
    assert len(story.logprobs) == (len(story.token_ids) if asked else 0), where
    entries = [(len(prompt) - 1 + i, entry, params.logprobs or 0) for i, entry in enumerate(story.logprobs)]
    if params.prompt_logprobs is not None and story.token_ids:
        assert len(story.prompt_logprobs) == len(prompt), where
        assert story.prompt_logprobs[0] is None
        entries += [(i, entry, params.prompt_logprobs) for i, entry in enumerate(story.prompt_logprobs[1:])]
    for position, entry, num_top in entries:
        row = normalised[position]
        following = [*prompt, *story.token_ids][position + 1]
        assert entry.token_id == following, where
        assert entry.logprob == pytest.approx(row[following], abs=1e-4), where
        near = int((np.abs(row - row[following]) < 1e-5).sum())
        assert abs(entry.rank - 1 - int((row > row[following]).sum())) < near, where
        assert len(entry.top) == (VOCAB if num_top == -1 else num_top), where
        best = np.sort(row)[::-1][: len(entry.top)]
        assert [value for _, value in entry.top] == pytest.approx(best.tolist(), abs=1e-4), where
        counts["logprobs"] += 1
    if params.logprob_token_ids and story.logprobs:
        first = story.logprobs[0].chosen
        assert [token for token, _ in first] == list(params.logprob_token_ids), where
        values = normalised[len(prompt) - 1][[token for token, _ in first]]
        assert [value for _, value in first] == pytest.approx(values.tolist(), abs=1e-4), where


def same(first, second):
    for req_id, ours in first.items():
        theirs = second[req_id]
        if "abort" in (ours.reason, theirs.reason):  # it may hit one schedule earlier than the other
            shorter = min(len(ours.token_ids), len(theirs.token_ids))
            assert ours.token_ids[:shorter] == theirs.token_ids[:shorter], req_id
        else:
            assert (ours.token_ids, ours.text, ours.reason) == (theirs.token_ids, theirs.text, theirs.reason), req_id


def test_the_runners_and_a_forward_alone_write_the_same_tokens(registry, capsys):
    torch.set_num_threads(1)
    counts = Counter()
    distinct = set()
    seed = 0
    while counts["steps"] < MIN_STEPS:
        case = scenario(seed)
        with build(registry, case, "v1") as first, build(registry, case, "v2", asynchronous=seed % 2 == 1) as second:
            v1 = run(first, case, counts)
            v2 = run(second, case, counts)
            same(v1, v2)
            distinct.update(token for ours in v1.values() for token in ours.token_ids)
            network = first.value(LoadedModel).network
            for arrival in case.arrivals:
                if v1[arrival.req_id].token_ids or v1[arrival.req_id].reason != "abort":
                    check_alone(network, case, arrival, v1[arrival.req_id], counts)
        seed += 1
    counts["distinct tokens"] = len(distinct)
    with capsys.disabled():
        print(f"\n{seed} scenarios: " + ", ".join(f"{value} {name}" for name, value in sorted(counts.items())))
    assert counts["preemptions"] >= 200
    assert counts["aborts"] >= 50
    assert counts["row moves"] >= 100
    assert counts["cached tokens"] >= 1000
    assert counts["logprobs"] >= 500
    assert counts["ended by stop"] >= 100
    assert counts["ended by length"] >= 100
    assert counts["distinct tokens"] >= 55  # of 61
    assert counts["near ties"] <= 2e-3 * counts["tokens alone"]


def test_the_reference_block_table_is_swapped_in_by_one_line(registry):
    counts = Counter()
    for seed in (1000, 1001):
        case = scenario(seed)
        with build(registry, case, "v2") as first, build(registry, case, "v2", tables="reference") as second:
            same(run(first, case, counts), run(second, case, counts))
