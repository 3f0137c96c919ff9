"""Speculation changes no token: every proposer, on both runners, against the same requests without one.

Random arrivals, lengths, aborts, chunk budgets and sampling parameters, caches so small that requests are preempted,
prompts that share prefixes, one or two cache groups, and 1 to 8 drafts a step. Greedy requests, and random ones whose
drafts were no choice, get the same tokens, text and reasons to end (B118: a seed means the same with and without
drafts); where drafts are drawn, both runners agree.
"""

import random
from collections import Counter, deque

import attrs
import pytest
import torch
from half_blocks import HalfBlocks
from letters import EOS, VOCAB, Letters
from oracles import dense_logits
from sampling_oracle import OFF, possible

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.errors import ConfigError
from workerkit.framework.hooks import hookimpl
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.observer import Observer
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.plugins import load_plugins

MAX_MODEL_LEN = 40


def drafting(architecture, most=8, **options):
    """The draft of a setup, and the largest K that it serves."""
    return {"draft": {"use": "random", "architecture": architecture, **options}}, most


BLOCK = {"target_layer_ids": [0, 1], "mask_token_id": 3, "block_size": 8, "num_target_layers": 3}
# Registered name -> setups: what stands beside `speculator` in `components`, and the largest K.
SETUPS = {
    "draft_model": [
        drafting("LlamaForCausalLM", num_hidden_layers=2),
        ({"draft": "target"}, 8),
    ],
    "eagle": [drafting("EagleLlamaForCausalLM")],
    "eagle3": [
        drafting("LlamaForCausalLMEagle3", draft_vocab_size=40, fields={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}),
    ],
    "mtp": [drafting("MTPDraftModel")],
    "medusa": [drafting("MedusaModel", fields={"medusa_num_heads": 8})],
    "dflash": [drafting("DFlashDraftModel", 7, fields=BLOCK)],
    "dspark": [drafting("DSparkDraftModel", fields={**BLOCK, "markov_rank": 8})],
    "ngram": [({}, 8)],
    "suffix": [({}, 8)],
    "composite": [({"draft": "target"}, 8)],
}
OPTIONS = {
    "ngram": {"min_n": 1},
    "composite": {"proposers": [{"use": "ngram", "min_n": 1}, "draft_model"]},
}
DRAWING = ("draft_model", "eagle", "eagle3", "mtp", "medusa", "dflash", "dspark")  # that know draft_sampling
HOST_TOKENS = ("suffix",)  # that wait for tokens, so steps cannot be planned ahead


class Mixed(Observer):
    """Counts steps in which some rows verify drafts and others read a prompt."""

    num_mixed = 0  # of all workers

    @hookimpl
    def batch_prepared(self, batch):
        plan = batch.plan
        Mixed.num_mixed += bool(plan.num_draft_tokens.any() and plan.is_prefilling.any())


@attrs.frozen
class Arrival:
    req_id: str
    step: int
    prompt: tuple[int, ...]
    params: SamplingParams
    abort_at: int | None


@attrs.frozen
class Scenario:
    seed: int
    count: int  # K
    budget: int
    max_num_reqs: int
    windows: bool
    half_blocks: bool
    spare_blocks: int
    arrivals: tuple[Arrival, ...]

    @property
    def num_blocks(self):  # one request of full length, and hardly more
        groups = 2 if self.windows else 1
        return 1 + groups * MAX_MODEL_LEN // 4 + self.spare_blocks


def random_params(rng, room, greedy):
    """Every parameter is off most of the time."""

    def sometimes(chance, *values):
        return rng.choice(values) if rng.random() < chance else None

    def tokens(most):
        return tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, most)))

    given = {
        "temperature": None if greedy else sometimes(0.7, 0.3, 0.8, 1.2),
        "top_k": sometimes(0.2, 2, 10),
        "top_p": sometimes(0.2, 0.5, 0.9),
        "frequency_penalty": sometimes(0.2, -0.5, 0.5),
        "repetition_penalty": sometimes(0.2, 0.8, 1.3),
        "logit_bias": sometimes(0.1, {rng.randrange(VOCAB): rng.uniform(-3, 3) for _ in range(3)}),
        "bad_words_token_ids": sometimes(0.2, tuple(tokens(2) for _ in range(5))),
        "stop_token_ids": sometimes(0.3, tokens(4)),
        "stop": sometimes(0.3, ("a", "Zx"), ("b1", "c", "Qq")),
        "min_tokens": sometimes(0.2, 1, 4),
        "ignore_eos": sometimes(0.5, True),
    }
    given = {name: value for name, value in given.items() if value is not None}
    # Nearly a third runs into the end of the context.
    given["max_tokens"] = room if rng.random() < 0.3 else rng.randint(1, room)
    given["min_tokens"] = min(given.get("min_tokens", 0), given["max_tokens"])
    return SamplingParams(**OFF | given, seed=rng.randrange(2**63))


def scenario(seed, count, greedy=False):
    rng = random.Random(seed)
    beginnings = [tuple(rng.randrange(EOS) for _ in range(rng.choice((8, 12)))) for _ in range(2)]
    arrivals, step = [], 0
    for number in range(rng.randint(5, 8)):
        step += rng.choice((0, 0, 1, 3))
        beginning = rng.choice(beginnings) if rng.random() < 0.5 else ()
        prompt = beginning + tuple(rng.randrange(EOS) for _ in range(rng.randint(0 if beginning else 1, 10)))
        arrival = Arrival(
            req_id=f"r{number}",
            step=step,
            prompt=prompt,
            params=random_params(rng, MAX_MODEL_LEN - len(prompt), greedy),
            abort_at=step + rng.randint(1, 12) if rng.random() < 0.15 else None,
        )
        arrivals.append(arrival)
    return Scenario(
        seed=seed,
        count=count,
        budget=rng.choice((4, 9, 17, 64)),
        max_num_reqs=rng.randint(2, 5),
        windows=rng.random() < 0.4,
        half_blocks=rng.random() < 0.3,
        spare_blocks=rng.choice((0, 4, 20)),
        arrivals=tuple(arrivals),
    )


@pytest.fixture(scope="module")
def registry():
    registry = load_plugins().registry
    registry.add(roles.ATTENTION, "half_blocks", HalfBlocks)
    registry.add(roles.TOKENIZER, "letters", Letters)
    registry.add(roles.OBSERVERS, "mixed", Mixed)
    return registry


def document(case, runner, asynchronous=False, speculator=None, sampling="greedy", **beside):
    loader = {"use": "random", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    if case.windows:
        loader |= {"sliding_window": 6, "full_attention_interval": 2}
    num_blocks = case.num_blocks
    if case.windows and beside.get("draft") == "target":  # whose layers make a group more
        num_blocks += MAX_MODEL_LEN // 4
    limits = {"max_num_reqs": case.max_num_reqs, "max_num_batched_tokens": case.budget, "seed": case.seed % 3}
    components = {
        "runner": runner,
        "loader": loader,
        "attention": "half_blocks" if case.half_blocks else "auto",
        "scheduler": {"use": "continuous", "async_scheduling": asynchronous},
        "tokenizer": "letters",
        "observers": ["mixed"],
    }
    if speculator is not None:
        limits["num_speculative_tokens"] = case.count
        options = {"draft_sampling": sampling} if speculator in DRAWING else {}
        components["speculator"] = {"use": speculator, **options, **OPTIONS.get(speculator, {})}
        components |= beside
    return {
        "model": {"source": "random", "max_model_len": MAX_MODEL_LEN},
        "limits": limits,
        "cache": {"block_size": 4, "num_blocks": num_blocks},
        "components": components,
    }


@attrs.define
class Story:
    """What came of one request."""

    token_ids: list[int] = attrs.field(factory=list)
    text: str = ""
    reason: str | None = None


def run(assembly, case, counts, choices=()):
    """request -> its story. `choices`: proposers that requests ask for, in turn."""
    engine = assembly.engine
    engine.start()
    stories = {arrival.req_id: Story() for arrival in case.arrivals}
    waiting, now, mixed_before = deque(case.arrivals), 0, Mixed.num_mixed
    while waiting or engine.has_unfinished:
        while waiting and waiting[0].step <= now:
            arrival, params = waiting[0], waiting.popleft().params
            if choices:
                choice = choices[int(arrival.req_id[1:]) % len(choices)]
                params = attrs.evolve(params, extra_args={"speculator": choice})
            engine.add_request(arrival.prompt, params, arrival.req_id)
        for arrival in case.arrivals:
            if arrival.abort_at == now:
                engine.abort(arrival.req_id)
        for delta in engine.step():
            story = stories[delta.req_id]
            story.token_ids += delta.token_ids
            story.text += delta.text
            story.reason = delta.finish_reason or story.reason
        engine.check_integrity()
        now += 1
    stats = engine.stats
    assert assembly.get(roles.RUNNER).num_requests == 0
    assert stats.num_free_blocks == assembly.worker.layout.num_blocks - 1
    counts["steps"] += stats.num_steps
    counts["tokens"] += sum(len(story.token_ids) for story in stories.values())
    counts["preemptions"] += stats.num_preemptions
    counts["cached tokens"] += stats.num_cached_tokens
    counts["drafts"] += stats.num_draft_tokens
    counts["accepted"] += stats.num_accepted_tokens
    counts["mixed steps"] += Mixed.num_mixed - mixed_before
    for story in stories.values():
        counts[f"ended by {story.reason}"] += 1
    return stories


def compare(case, plain, ours, network, counts, where, skip=()):
    """The same stories, but for what a near-tie leaves open: kernels differ with the number of rows."""
    for arrival in case.arrivals:
        first, second = plain[arrival.req_id], ours[arrival.req_id]
        if arrival.req_id in skip:
            continue
        shorter = min(len(first.token_ids), len(second.token_ids))
        pairs = zip(first.token_ids, second.token_ids, strict=False)
        differs = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
        if differs is not None:
            check_near_tie(arrival, first.token_ids, second.token_ids, differs, network, where)
            counts["near ties"] += 1
        elif "abort" not in (first.reason, second.reason):  # that may come some tokens earlier
            assert (first.token_ids, first.text, first.reason) == (second.token_ids, second.text, second.reason), where
        counts["compared"] += shorter


def check_near_tie(arrival, first, second, index, network, where):
    params, prompt = arrival.params, arrival.prompt
    row = dense_logits(network, [*prompt, *first[:index]], len(prompt))[-1].double().numpy()
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    left_open = possible(row, params, prompt, first[:index], stop_ids)
    assert {first[index], second[index]} <= left_open, f"{where}, {arrival.req_id}: token {index}"


RUNS = (("v1", False), ("v2", False), ("v2", True))
CASES = [(name, number) for name, setups in SETUPS.items() for number in range(len(setups))]


def test_every_proposer_is_covered(registry):
    assert set(SETUPS) == set(registry.offers[roles.SPECULATOR.name]) - {"none"}


@pytest.mark.parametrize(("name", "number"), CASES)
def test_speculation_changes_no_token(name, number, registry, capsys):
    torch.set_num_threads(1)
    beside, most = SETUPS[name][number]
    choices = ("ngram", "draft_model", "none") if name == "composite" else ()
    counts = Counter()
    for seed in range(100 * number, 100 * number + 3):
        rng = random.Random(f"{name} {number} {seed}")
        case = scenario(rng.randrange(10**9), count=rng.randint(1, most) if seed % 3 else most, greedy=seed % 2 == 0)
        with assemble(document(case, "v2"), registry=registry) as assembly:
            plain = run(assembly, case, Counter())
            network = assembly.value(LoadedModel).network
            for runner, asynchronous in RUNS:
                if asynchronous and name in HOST_TOKENS:
                    with pytest.raises(ConfigError, match="reads sampled tokens on the host"):
                        assemble(document(case, runner, asynchronous, name, **beside), registry=registry)
                    continue
                with assemble(document(case, runner, asynchronous, name, **beside), registry=registry) as other:
                    ours = run(other, case, counts, choices)
                where = f"{name}, seed {seed}, {runner}, async {asynchronous}, K {case.count}"
                compare(case, plain, ours, network, counts, where)
    with capsys.disabled():
        print(f"\n{name}: " + ", ".join(f"{value} {what}" for what, value in sorted(counts.items())))
    assert counts["near ties"] <= 2e-3 * counts["compared"]
    assert counts["drafts"] >= 100
    assert counts["preemptions"] >= 3
    assert counts["mixed steps"] >= 2
    assert counts["ended by stop"] >= 1
    assert counts["ended by length"] >= 3


@pytest.mark.parametrize("name", DRAWING)
def test_drawn_drafts_change_no_greedy_token_and_the_runners_agree(name, registry):
    """Random requests with such drafts are distributed as without; which tokens come depends on what was drafted."""
    torch.set_num_threads(1)
    beside, most = SETUPS[name][0]
    counts = Counter()
    for seed in range(2):
        rng = random.Random(f"drawn {name} {seed}")
        case = scenario(rng.randrange(10**9), count=rng.randint(2, most))
        with assemble(document(case, "v2"), registry=registry) as assembly:
            plain = run(assembly, case, Counter())
            network = assembly.value(LoadedModel).network
            stories = {}
            for runner, asynchronous in RUNS:
                sampling = document(case, runner, asynchronous, name, "probabilistic", **beside)
                with assemble(sampling, registry=registry) as other:
                    stories[runner, asynchronous] = run(other, case, counts)
            drawn = {arrival.req_id for arrival in case.arrivals if arrival.params.temperature}
            for ours in stories.values():
                compare(case, plain, ours, network, counts, f"{name}, seed {seed}", skip=drawn)
            compare(case, stories["v1", False], stories["v2", False], network, counts, f"{name}, seed {seed}")
    assert counts["near ties"] <= 5e-3 * counts["compared"]
    assert counts["drafts"] >= 50


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize(("runner", "asynchronous"), RUNS)
def test_a_target_that_drafts_for_itself_accepts_everything(count, runner, asynchronous, registry):
    """K + 1 tokens a step, but for a request's last step; also across chunks and sliding windows."""
    torch.set_num_threads(1)
    prompts = [tuple((7 * i + 5 * j) % EOS for j in range(length)) for i, length in enumerate((3, 16, 9))]
    case = Scenario(
        seed=count,
        count=count,
        budget=30,
        max_num_reqs=3,
        windows=count % 2 == 0,
        half_blocks=count % 3 == 0,
        spare_blocks=60,
        arrivals=tuple(
            Arrival(f"r{i}", 0, prompt, SamplingParams(**OFF, max_tokens=20, ignore_eos=True), None)
            for i, prompt in enumerate(prompts)
        ),
    )
    counts = Counter()
    config = document(case, runner, asynchronous, "draft_model", draft="target")
    with assemble(config, registry=registry) as assembly:
        run(assembly, case, counts)
    assert counts["accepted"] == counts["drafts"]
    assert counts["tokens"] == 60
    if not asynchronous:
        # one token comes with the prompt, the others K + 1 at a time
        assert counts["drafts"] == 3 * (19 - -(-19 // (count + 1)))
