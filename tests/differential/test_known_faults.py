"""Faults that users of such systems reported, in sampling and in a request's life, with the right value, on V1 and V2.

What needs no runner (detokenising, stop strings, tokenizers, kernels) is tested where it lives.
"""

import attrs
import numpy as np
import pytest
import torch
from letters import EOS, LETTERS, VOCAB, Letters
from table_model import add_table_model

from workerkit.components.sampler.per_request import PerRequestStage
from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.errors import RequestError
from workerkit.framework.interfaces.request import CachedRequest, GrammarOutput, NewRequest, SchedulerOutput
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling_params import SamplingParams, StructuredOutputsParams
from workerkit.framework.interfaces.speculation import Drafts, Speculator
from workerkit.framework.plugins import PluginHost, load_plugins
from workerkit.framework.testing.recording import Recorder
from workerkit.framework.testing.registry import fakes_plugin

NEXT = {token: (token + 1) % EOS for token in range(EOS)}  # what the alphabet's table says: b after a, c after b, …


def alphabet():
    """Logits 10 for the next letter, 0 to 6 for the others."""
    table = torch.arange(VOCAB).remainder(7).float().expand(VOCAB, -1).clone()
    for token, following in NEXT.items():
        table[token, following] = 10
    table[EOS, 0] = 10
    table[:, EOS] = -5
    return table


@pytest.fixture(params=["v1", "v2"])
def runner(request):
    return request.param


@pytest.fixture
def make(runner):
    """make(table=…, components…) -> an assembly over a table model, with everything else real."""
    made = []

    def factory(table=None, limits=None, recorder=None, cache=None, extra=(), **components):
        registry = load_plugins().registry
        PluginHost(registry).load("fakes", fakes_plugin)
        add_table_model(registry, alphabet() if table is None else table)
        registry.add(roles.TOKENIZER, "letters", Letters)
        for role, name, part in extra:
            registry.add(role, name, part)
        config = {
            "model": {"source": "table", "max_model_len": 64},
            "limits": {"max_num_reqs": 8, "max_num_batched_tokens": 32, **(limits or {})},
            "cache": {"block_size": 4, "num_blocks": 64, **(cache or {})},
            "components": {"runner": runner, "model": "table", "loader": "table", "tokenizer": "letters", **components},
        }
        tools = assemble(config, registry=registry) if recorder is None else recorder.assemble(config, None, registry)
        made.append(tools)
        return tools

    yield factory
    for assembly in made:
        assembly.shutdown()


def started(assembly):
    assembly.engine.start()
    return assembly.engine


def greedy(**more):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **more})


# --- min_tokens


@pytest.mark.parametrize("count", [0, 1, 4])
def test_b04_the_end_is_free_right_after_min_tokens(make, count):
    engine = started(make())
    [done] = engine.generate([0], greedy(logit_bias={EOS: 100.0}, min_tokens=count, max_tokens=32))
    assert len(done.token_ids) == count
    assert EOS not in done.token_ids
    assert done.finish_reason == "stop"


def test_b06_stop_strings_wait_for_min_tokens(make):
    engine = started(make())
    [done] = engine.generate([0], greedy(stop=("c",), min_tokens=20, max_tokens=30))
    assert len(done.token_ids) >= 20
    assert "c" in done.text


def test_b07_a_complete_grammar_wins_over_min_tokens(make):
    engine = started(make())
    choice = StructuredOutputsParams(choice=("ab",))
    [done] = engine.generate([5], greedy(structured_outputs=choice, min_tokens=6))
    assert (done.text, done.finish_reason, done.error) == ("ab", "stop", None)


# --- ids beyond the vocabulary


def test_b10_an_id_beyond_the_vocabulary_is_one_requests_error(make):
    engine = started(make())
    engine.add_request([0], greedy(), "lives")
    engine.step()
    for params in (
        greedy(logit_bias={191222: -100.0}),
        greedy(allowed_token_ids=(VOCAB,)),
        greedy(bad_words_token_ids=((1, VOCAB),)),
        greedy(logprob_token_ids=(VOCAB,)),
        greedy(stop_token_ids=(VOCAB,)),
    ):
        with pytest.raises(RequestError, match=f"{VOCAB - 1}"):
            engine.add_request([0], params)
    engine.add_request([0], greedy(logit_bias={VOCAB - 1: 5.0}), "fits")  # an added token, the last of the model's
    finished = {delta.req_id: delta.finish_reason for delta in drain(engine)}
    assert finished == {"lives": "length", "fits": "length"}


def drain(engine):
    deltas = []
    while engine.has_unfinished:
        deltas += engine.step()
    return [delta for delta in deltas if delta.finish_reason]


# --- steps by hand


def new(req_id, tokens, params, prompt_len=None, block=1, **more):
    count = -(-(len(tokens) + params.max_tokens) // 4)
    return NewRequest(
        req_id=req_id,
        token_ids=tuple(tokens),
        prompt_len=prompt_len or len(tokens),
        sampling=params,
        block_ids=(tuple(range(block, block + count)),),
        **more,
    )


def step(worker, *requests, cached=(), drafts=None, grammar=None, finished=(), preempted=(), chunks=None):
    """Prefill of the new requests, decode of the cached (req_id, num_computed_tokens)."""
    drafts = drafts or {}
    scheduled = {req_id: 1 + drafts.get(req_id, 0) for req_id, _ in cached}
    scheduled |= {r.req_id: r.prefill_len - r.num_computed_tokens for r in requests}
    output = SchedulerOutput(
        new_requests=requests,
        cached_requests=tuple(CachedRequest(req_id=req_id, num_computed_tokens=n) for req_id, n in cached),
        num_scheduled_tokens=scheduled | (chunks or {}),
        scheduled_drafts=drafts,
        finished_req_ids=frozenset(finished),
        preempted_req_ids=frozenset(preempted),
    )
    worker.execute_model(output)
    return worker.sample_tokens(grammar).get()


def tokens_of(answer):
    return dict(zip(answer.req_ids, answer.sampled_token_ids, strict=True))


# --- penalties


def test_b11_repetition_counts_the_prompt_presence_and_frequency_do_not(make):
    table = torch.tensor([[1.0, 2.0, -2.0, 4.0, 5.0]]).expand(5, -1)
    assembly = make(table, sampler={"use": "torch", "logprobs": "processed"}, tokenizer="fake")
    assembly.worker.start()
    params = greedy(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, logprobs=-1)
    answer = step(assembly.worker, new("r", (1, 1, 2, 3, 3), params, prompt_len=3))
    [ids], [values] = answer.logprobs["r"].token_ids, answer.logprobs["r"].logprobs
    found = dict(zip(ids.tolist(), values.tolist(), strict=True))
    right = [1.0, 1.0, -4.0, 0.75, 5.0]
    assert [found[token] - found[4] for token in range(5)] == pytest.approx([x - 5.0 for x in right], abs=1e-5)


@pytest.mark.parametrize("ahead", [False, True])
def test_b134_penalties_see_the_newest_token_also_with_asynchronous_scheduling(make, ahead):
    table = torch.zeros(VOCAB, VOCAB)
    table[:, 3], table[:, 5], table[:, EOS] = 4.0, 3.0, -9.0
    engine = started(make(table, scheduler={"use": "continuous", "async_scheduling": ahead}))
    plain = engine.add_request([0], greedy(max_tokens=12))
    engine.step()
    penalised = engine.add_request([0], greedy(repetition_penalty=2.0, max_tokens=6))
    done = {plain: [], penalised: []}
    while engine.has_unfinished:
        for delta in engine.step():
            done[delta.req_id] += delta.token_ids
    assert set(done[plain]) == {3}
    assert done[penalised][:3] == [3, 5, 3]  # 4 and 3; then 2 and 3; then 2 and 1.5


# --- seeds


def test_b15_b16_a_seeded_request_has_its_tokens_whatever_runs_beside_it(make):
    engine = started(make(torch.zeros(VOCAB, VOCAB)))
    seeded = SamplingParams(temperature=0.8, seed=42, max_tokens=10, ignore_eos=True)
    other = SamplingParams(temperature=0.8, max_tokens=10, ignore_eos=True)
    [alone] = engine.generate([7], seeded)
    for _ in range(4):
        first, second = engine.generate([[7], [9, 9]], [seeded, other])
        assert first.token_ids == alone.token_ids
        swapped, again = engine.generate([[9, 9], [7]], [other, seeded])
        assert again.token_ids == alone.token_ids
        assert second.token_ids != swapped.token_ids  # no seed: new numbers


# --- drafts


class Parrot(Speculator):
    """Proposes what the test wrote into `drafts`, by request."""

    drafts: dict[str, list[int]] = {}  # noqa: RUF012  each test overwrites it

    def __init__(self, shape: WorkerShape) -> None:
        self._shape = shape

    @property
    def num_speculative_tokens(self):
        return self._shape.num_speculative_tokens

    def propose(self, inputs):
        rows = [self.drafts.get(req_id, [0] * self.num_speculative_tokens) for req_id in inputs.batch.req_ids]
        return Drafts(token_ids=torch.tensor(rows))


def verify_rows(make, requests, drafts, **components):
    """Processed logits of the step that verifies: [logits rows, V], prefill first, then one verify step."""
    recorder = Recorder()
    assembly = make(
        recorder=recorder,
        limits={"num_speculative_tokens": 2},
        extra=[(roles.SPECULATOR, "parrot", Parrot)],
        speculator="parrot",
        rejection="fake",
        **components,
    )
    assembly.worker.start()
    Parrot.drafts = drafts
    step(assembly.worker, *requests)
    recorder.clear()
    cached = [(r.req_id, r.prefill_len) for r in requests]
    answer = step(assembly.worker, cached=cached, drafts={r.req_id: 2 for r in requests})
    (call,) = recorder.of("rejection.verify")
    return call.args["logits"], answer


def test_b24_bad_words_reach_the_rows_of_their_own_request(make):
    logits, _ = verify_rows(
        make,
        [new("r0", [1], greedy()), new("r1", [1], greedy(bad_words_token_ids=((9,),)), block=10)],
        {"r0": [3, 4], "r1": [3, 4]},
    )
    assert (logits[:, 9] == float("-inf")).tolist() == [False] * 3 + [True] * 3


def test_b25_a_bad_word_may_begin_in_the_drafts(make):
    word = greedy(bad_words_token_ids=((5, 6),))
    logits, _ = verify_rows(make, [new("r", [3], word)], {"r": [5, 1]})  # after 3 comes 4
    assert (logits[:, 6] == float("-inf")).tolist() == [False, True, False]
    logits, _ = verify_rows(make, [new("r", [4], word)], {"r": [1, 2]})  # after 4 comes 5
    assert (logits[:, 6] == float("-inf")).tolist() == [True, False, False]
    assert (logits[:, :6] > float("-inf")).all()


def test_b115_verify_rows_get_every_stage_of_their_request(make):
    params = greedy(frequency_penalty=1.0)
    logits, _ = verify_rows(make, [new("r", [3], params)], {"r": [7, 7]})
    table = alphabet()
    assert logits[0, 7] == table[4, 7]
    assert logits[1, 7] == table[7, 7] - 1
    assert logits[2, 7] == table[7, 7] - 2
    assert logits[2, 4] == table[7, 4] - 1  # committed
    top = SamplingParams(temperature=1.0, top_k=1, seed=1, max_tokens=8)
    logits, _ = verify_rows(make, [new("r", [3], top)], {"r": [1, 2]})
    assert (logits > float("-inf")).sum(dim=1).tolist() == [1, 1, 1]


def test_b53_logprobs_of_a_verify_row_beside_a_partial_prefill(make):
    recorder = Recorder()
    assembly = make(
        recorder=recorder,
        limits={"num_speculative_tokens": 2},
        extra=[(roles.SPECULATOR, "parrot", Parrot)],
        speculator="parrot",
        rejection="fake",
    )
    worker = assembly.worker
    worker.start()
    Parrot.drafts = {"r1": [5, 0]}  # after 3 and 4: 5 is right, 0 is not
    step(worker, new("r1", [3], greedy(logprobs=1)))
    chunk = {"r0": 2}
    answer = step(
        worker,
        new("r0", [8] * 4, greedy(logprobs=1), block=10),
        cached=[("r1", 1)],
        drafts={"r1": 2},
        chunks=chunk,
    )
    assert tokens_of(answer) == {"r0": (), "r1": (5, 6)}
    assert set(answer.logprobs) == {"r1"}
    assert answer.logprobs["r1"].token_ids[:, 0].tolist() == [5, 6]
    normalised = alphabet().log_softmax(-1)
    assert answer.logprobs["r1"].logprobs[:, 0].tolist() == pytest.approx(
        [float(normalised[4, 5]), float(normalised[5, 6])]
    )


# --- prompt logprobs


@pytest.mark.parametrize("budget", [10, 9, 5, 3, 1])
def test_b52_prompt_logprobs_do_not_depend_on_chunks(make, budget):
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
    engine = started(make(table, limits={"max_num_batched_tokens": budget, "max_num_reqs": 1}))
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    deltas = list(engine.stream(prompt, greedy(prompt_logprobs=1, max_tokens=3)))
    carried = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    assert len(carried) == 1
    [entries] = carried
    assert len(entries) == 10
    assert entries[0] is None
    normalised = table.log_softmax(-1)
    for before, token, entry in zip(prompt[:-1], prompt[1:], entries[1:], strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(normalised[before, token]), abs=1e-5)
        assert entry.top[0] == (int(table[before].argmax()), pytest.approx(float(normalised[before].max()), abs=1e-5))


# --- grammars


def bits(allowed):
    mask = np.zeros(64, np.uint8)
    mask[list(allowed)] = 1
    return np.packbits(mask, bitorder="little").view(np.int32)


def structured():
    return greedy(structured_outputs=StructuredOutputsParams(choice=("x",)))


def test_b94_masks_go_by_request_and_leave_the_others_alone(make):
    assembly = make()
    assembly.worker.start()
    requests = [
        new("r0", [0], structured()),
        new("r1", [0], greedy(), block=10),
        new("r2", [0], structured(), block=20),
    ]
    masks = GrammarOutput(req_ids=("r2", "gone", "r0"), bitmask=np.stack([bits({7}), bits({8}), bits({9})]))
    answer = step(assembly.worker, *requests, grammar=masks)
    assert tokens_of(answer) == {"r0": (9,), "r1": (1,), "r2": (7,)}


def test_b95_a_structured_request_without_a_mask_fails_alone(make):
    assembly = make()
    assembly.worker.start()
    answer = step(assembly.worker, new("r0", [0], structured()), new("r1", [0], greedy(), block=10))
    assert tokens_of(answer) == {"r0": (-1,), "r1": (1,)}


def test_b106c_a_bad_grammar_is_one_requests_error(make):
    engine = started(make())
    with pytest.raises(RequestError, match="regex"):
        engine.add_request([0], greedy(structured_outputs=StructuredOutputsParams(regex="(")))
    [done] = engine.generate([0], greedy())
    assert done.finish_reason == "length"


# --- rows and slots


def test_b110_what_a_request_left_behind_does_not_reach_the_next_one(make):
    """A's row is taken by B, whose limits stay; C, without limits, gets B's old row, and A's slot."""
    assembly = make(limits={"max_num_reqs": 2})
    worker = assembly.worker
    worker.start()
    step(worker, new("A", [0], greedy()), new("B", [0], greedy(allowed_token_ids=(5,)), block=10))
    answer = step(worker, new("C", [20], greedy(), block=20), cached=[("B", 1)], finished=["A"])
    assert tokens_of(answer) == {"B": (5,), "C": (21,)}
    answer = step(worker, new("D", [30], greedy(), block=30), cached=[("C", 1)], finished=["B"])
    assert tokens_of(answer) == {"C": (22,), "D": (31,)}


class BanThird(PerRequestStage):
    """No 7 as the third token of the output."""

    parameters = ("ban_third",)

    def processor(self, params):
        if "ban_third" not in params.extra_args:
            return None

        def ban(prompt, output, logits):
            if len(output) == 2:
                logits[7] = float("-inf")
            return logits

        return ban


def test_b113_a_processor_of_a_request_outlives_chunks_and_preemption(make):
    """Letters 5, 6 and, were it not banned, 7."""
    plain = make(
        limits={"max_num_batched_tokens": 2, "max_num_reqs": 2},
        extra=[(roles.SAMPLER_STAGE, "ban_third", BanThird)],
        sampler={"use": "torch", "stages": ["ban_third"]},
    )
    worker = plain.worker
    worker.start()
    params = greedy(extra_args={"ban_third": True})
    whole = new("whole", [2, 3, 4, 4, 4], params)
    outputs = []
    step(worker, whole, chunks={"whole": 2})
    step(worker, cached=[("whole", 2)], chunks={"whole": 2})
    outputs += tokens_of(step(worker, cached=[("whole", 4)]))["whole"]
    outputs += tokens_of(step(worker, cached=[("whole", 5)]))["whole"]
    assert outputs == [5, 6]
    back = new("whole", [2, 3, 4, 4, 4, 5, 6], params, prompt_len=5, block=20)
    step(worker, back, chunks={"whole": 2}, preempted=["whole"])
    step(worker, cached=[("whole", 2)], chunks={"whole": 2})
    step(worker, cached=[("whole", 4)], chunks={"whole": 2})
    outputs += tokens_of(step(worker, cached=[("whole", 6)]))["whole"]
    table = alphabet()
    table[6, 7] = float("-inf")
    assert outputs[2] == int(table[6].argmax()) != 7


# --- logits that are no numbers


def test_b117_logits_that_are_no_numbers_end_their_request_alone(make):
    table = alphabet()
    table[4] = float("nan")
    table[9] = float("-inf")
    engine = started(make(table))
    texts = ["d", "h", "A"]  # reach 4 at once, 9 after two tokens, neither
    for params in (greedy(), SamplingParams(temperature=1.0, top_k=1, seed=3, max_tokens=8)):
        nan, nothing, fine = engine.generate(texts, params)
        assert (nan.text, nan.finish_reason) == ("e", "error")
        assert "no token" in nan.error
        assert (nothing.text, nothing.finish_reason) == ("ij", "error")
        assert (fine.text, fine.finish_reason) == ("BCDEFGHI", "length")


# --- the prefix cache


def test_b28_b29_blocks_are_shared_by_content_and_identity_only(make):
    from workerkit.framework.interfaces.engine import CacheIdentity

    engine = started(make())
    prompt = [LETTERS.index(letter) for letter in "abcdefghijklm"]

    def cached(identity, tokens=prompt):
        before = engine.stats.num_cached_tokens
        engine.add_request(tokens, greedy(), cache_identity=identity)
        drain(engine)
        return engine.stats.num_cached_tokens - before

    one = CacheIdentity(lora="adapters/a#1")
    assert cached(one) == 0
    assert cached(one) == 12
    assert cached(CacheIdentity(lora="adapters/a#2")) == 0  # the same name, another adapter
    assert cached(CacheIdentity(salt="s")) == 0
    assert cached(one, [40, *prompt[1:]]) == 0  # later blocks are equal, the first is not


def test_b102_a_preempted_request_that_finds_its_own_blocks_is_no_hit(make):
    engine = started(make(cache={"num_blocks": 1 + 16}, limits={"max_num_reqs": 4}))
    prompts = [[start, *range(start + 1, start + 9)] for start in (0, 10, 20, 30)]
    params = [attrs.evolve(greedy(max_tokens=40), seed=1)] * 4
    done = engine.generate(prompts, params)
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_cached_tokens == 0
    assert all(completion.num_cached_tokens == 0 for completion in done)
    assert [len(completion.token_ids) for completion in done] == [40] * 4
