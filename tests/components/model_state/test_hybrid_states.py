"""Recurrent states through whole workers, V1 and V2: the network's tokens are those of a direct evaluation, whatever
batches, chunks, drafts and preemptions come on the way."""

import pytest
import torch
from toy_hybrid import LAYERS, STATE_BYTES, add_toy_hybrid, read, state_after, toy_tokens

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.errors import RequestError, UnsupportedError
from workerkit.framework.interfaces.kv_cache import KVCaches
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.request import CachedRequest, NewRequest, SchedulerOutput, StateSave
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.interfaces.speculation import Drafts, Speculator
from workerkit.framework.testing.registry import fake_registry

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4, 5, 6], [5], [(7 * i * i + i) % 16 for i in range(45)], [0, 1, 2] * 7, [3, 3, 3, 3], [9, 8] * 16]
NGRAM = {"limits": {"num_speculative_tokens": 3}, "speculator": "ngram"}


@pytest.fixture(params=["v1", "v2"])
def runner(request):
    return request.param


@pytest.fixture
def make(runner):
    made = []

    def factory(limits=None, cache=None, extra=(), **components):
        registry = add_toy_hybrid(fake_registry())
        for role, name, part in extra:
            registry.add(role, name, part)
        config = {
            "model": {"source": "toy", "max_model_len": 96},
            "limits": {"max_num_reqs": 4, "max_num_batched_tokens": 20, **(limits or {})},
            "cache": {"block_size": 4, "num_blocks": 120, **(cache or {})},
            "components": {
                "runner": runner,
                "model": "toy_hybrid",
                "loader": "toy_hybrid",
                "attention": "reference",
                "kernels": ["reference"],
                "tokenizer": "fake",
                "chat_template": "fake",
                "graph": "none",
                **components,
            },
        }
        made.append(assemble(config, registry=registry))
        return made[-1]

    yield factory
    for assembly in made:
        assembly.shutdown()


def served(assembly, prompts=PROMPTS, params=GREEDY):
    assembly.engine.start()
    done = assembly.engine.generate(prompts, params)
    for prompt, completion in zip(prompts, done, strict=True):
        assert list(completion.token_ids) == toy_tokens(prompt, len(completion.token_ids))
        assert len(completion.token_ids) == params.max_tokens
    return assembly


def batches(assembly):
    return assembly.value(LoadedModel).network.batches


# --- through the engine


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("drafts", [{}, NGRAM])
@pytest.mark.parametrize("num_blocks", [120, 30])
def test_tokens_are_those_of_a_direct_evaluation(make, runner, drafts, is_async, num_blocks):
    """Six requests in four rows, prompts longer than a step, and with 30 blocks preemptions."""
    if is_async and runner == "v1":
        pytest.skip("V1 waits for its tokens")
    scheduler = {"use": "continuous", "async_scheduling": is_async, "prefix_caching": False}
    assembly = served(make(cache={"num_blocks": num_blocks}, scheduler=scheduler, **drafts))
    stats = assembly.engine.stats
    assert (stats.num_preemptions > 0) == (num_blocks == 30)
    if drafts:
        assert 10 < stats.num_accepted_tokens < stats.num_draft_tokens - 10
        kinds = {(b.is_verifying_np.any(), not b.is_verifying_np.all()) for b in batches(assembly)}
        assert (True, True) in kinds, "steps with both kinds of rows"
    zeros = batches(assembly)[0].states
    assert all(not tensor[-1].any() for states in zeros for tensor in states), "the row of nobody stays as it was"


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("drafts", [{}, NGRAM])
@pytest.mark.parametrize(("num_blocks", "interval"), [(160, None), (160, 8), (45, None)])
def test_prefixes_that_are_found_change_no_token(make, runner, drafts, is_async, num_blocks, interval):
    """Prompts begin like others, and like others with their answers: copies of prefills and of decodes are found."""
    if is_async and runner == "v1":
        pytest.skip("V1 waits for its tokens")
    scheduler = {"use": "continuous", "async_scheduling": is_async}
    assembly = make(cache={"num_blocks": num_blocks, "state_interval": interval}, scheduler=scheduler, **drafts)
    served(assembly)
    again = [[*prompt, *toy_tokens(prompt, 24), 5, 6][:50] for prompt in PROMPTS]
    assert assembly.engine.stats.num_cached_tokens == 0 or num_blocks == 45
    done = assembly.engine.generate(again, GREEDY)
    for prompt, completion in zip(again, done, strict=True):
        assert list(completion.token_ids) == toy_tokens(prompt, len(completion.token_ids))
    if num_blocks == 160:
        step = interval or 4
        hits = [completion.num_cached_tokens for completion in done]
        assert all(hit % step == 0 for hit in hits)
        if not drafts:
            assert hits == [(len(prompt) - 2) // step * step for prompt in again], "all of what was computed before"
        assert sum(hits) > 60


def test_compiled_graphs_step_aside(make, caplog):
    scheduler = {"use": "continuous", "prefix_caching": False}
    served(make(graph="compiled", kernels="auto", attention="cpu", scheduler=scheduler), PROMPTS[:2])
    assert "steps run eagerly" in caplog.text


def test_states_that_sleep_takes_come_back(make):
    scheduler = {"use": "continuous", "prefix_caching": False}
    assembly = served(make(scheduler=scheduler), PROMPTS[:2])
    tensors = [tensor for states in batches(assembly)[0].states for tensor in states]
    assembly.worker.sleep(1)
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    assembly.worker.wake_up()
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
    served_again = assembly.engine.generate(PROMPTS[2:4], GREEDY)
    for prompt, done in zip(PROMPTS[2:4], served_again, strict=True):
        assert list(done.token_ids) == toy_tokens(prompt, 40)


def test_a_step_is_measured_with_the_states_and_gives_them_back(make):
    assembly = make(cache={"num_blocks": None, "memory_fraction": 0.001})
    worker = assembly.worker
    worker.init_device()
    worker.load_model()
    worker.determine_available_memory()
    pool = assembly.get(roles.MEMORY_POOL)
    assert pool.discard("kv_cache") == 0, "what was tried is forgotten"
    pool.restore("kv_cache")


# --- step by step


class Scripted(Speculator):
    """Proposes what it is told: for each step, for each of its first rows."""

    script: list = []  # noqa: RUF012

    @property
    def num_speculative_tokens(self):
        return 3

    def propose(self, inputs):
        rows = self.script.pop(0) if self.script else []
        rows = [*rows, *[[]] * inputs.batch.num_reqs][: inputs.batch.num_reqs]
        return Drafts(token_ids=torch.tensor([[*row, -1, -1, -1][:3] for row in rows]))


class Driven:
    """A worker that is told each step by hand."""

    def __init__(self, assembly):
        self.assembly = assembly
        assembly.worker.start()
        self.worker = assembly.worker
        self.caches = assembly.value(KVCaches)
        self.kv_cache = assembly.get(roles.KV_CACHE)
        batches(assembly).clear()

    def step(self, new=(), cached=None, count=None, drafts=None, **more):
        cached = cached or {}
        scheduled = {r.req_id: r.prefill_len - r.num_computed_tokens for r in new} | dict.fromkeys(cached, 1)
        scheduled |= count or {}
        for req_id, number in (drafts or {}).items():
            scheduled[req_id] += number
        output = SchedulerOutput(
            new_requests=tuple(new),
            cached_requests=tuple(CachedRequest(req_id=r, num_computed_tokens=n) for r, n in cached.items()),
            num_scheduled_tokens=scheduled,
            scheduled_drafts=drafts or {},
            **more,
        )
        assert self.worker.execute_model(output) is None
        result = self.worker.sample_tokens().get()
        return dict(zip(result.req_ids, map(list, result.sampled_token_ids), strict=True))

    def kept(self, *block_ids):
        """The state that a copy holds."""
        saved = self.kv_cache.read_state(self.caches, block_ids, STATE_BYTES)
        conv, number, matrix = saved.split([3, 8, 16])
        states = (
            (conv.view(1, -1).view(torch.int8), number.clone().view(1, -1).view(torch.int64)),
            (matrix.clone().view(torch.float32).view(1, 2, 2),),
        )
        return read(states, 0)


def new(req_id, tokens, blocks, **more):
    return NewRequest(
        req_id=req_id,
        token_ids=tuple(tokens),
        prompt_len=len(tokens),
        sampling=GREEDY,
        block_ids=(tuple(blocks),),
        **more,
    )


@pytest.fixture
def scripted(make):
    def factory(*script):
        Scripted.script = list(script)
        limits = {"num_speculative_tokens": 3}
        extra = ((roles.SPECULATOR, "scripted", Scripted),)
        return Driven(make(limits=limits, extra=extra, speculator="scripted", rejection="standard"))

    return factory


PROMPT = [1, 2, 3, 4, 5]
AFTER = toy_tokens(PROMPT, 20)


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_b46_a_step_without_drafts_goes_on_from_the_accepted_offset(scripted, right):
    wrong = [token + 1 for token in AFTER[1:4]]
    w = scripted([[*AFTER[1 : 1 + right], *wrong[right:]]])
    assert w.step([new("a", PROMPT, range(1, 11))]) == {"a": AFTER[:1]}
    assert w.step(cached={"a": 5}, drafts={"a": 3}) == {"a": AFTER[1 : 2 + right]}
    for position in range(2 + right, 8):
        assert w.step(cached={"a": 4 + position}) == {"a": [AFTER[position]]}


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_drafts_after_drafts(scripted, right):
    def proposal(begin):
        return [[*AFTER[begin : begin + right], 99, 99, 99][:3]]

    step = right + 1
    w = scripted(*[proposal(begin) for begin in (1, 1 + step, 1 + 2 * step)])
    w.step([new("a", PROMPT, range(1, 11))])
    for begin in (1, 1 + step, 1 + 2 * step):
        assert w.step(cached={"a": 4 + begin}, drafts={"a": 3}) == {"a": AFTER[begin : begin + step]}


def test_b47_a_copy_at_a_block_boundary_leaves_the_running_state_alone(scripted):
    """6 tokens are computed, 3 scheduled, 1 of the 2 drafts is right: 8 tokens exactly."""
    prompt = [*PROMPT, 2]
    after = toy_tokens(prompt, 6)
    w = scripted([[after[1], 99]])
    w.step([new("a", prompt, range(1, 11))])
    saves = (StateSave(req_id="a", num_tokens=8, block_ids=(20, 21)),)
    assert w.step(cached={"a": 6}, drafts={"a": 2}, state_saves=saves) == {"a": after[1:3]}
    assert w.kept(20, 21) == state_after([*prompt, *after[:2]])
    assert w.step(cached={"a": 8}) == {"a": after[3:4]}
    assert w.step(cached={"a": 9}) == {"a": after[4:5]}


@pytest.mark.parametrize("num_tokens", [6, 7, 8, 9])
def test_copies_are_of_the_token_they_were_asked_for(scripted, num_tokens):
    """All four tokens of the step are right, whichever one ends the prefix."""
    w = scripted([AFTER[1:4]])
    w.step([new("a", PROMPT, range(1, 11))])
    saves = (StateSave(req_id="a", num_tokens=num_tokens, block_ids=(30, 31)),)
    w.step(cached={"a": 5}, drafts={"a": 3}, state_saves=saves)
    assert w.kept(30, 31) == state_after([*PROMPT, *AFTER][:num_tokens])


def test_b168_chunks_leave_copies_of_their_ends_only_and_a_hit_goes_on_like_a_cold_run(scripted):
    prompt = [(5 * i + 2) % 13 for i in range(19)]
    after = toy_tokens(prompt, 5)
    w = scripted()
    cold = new("a", prompt, range(1, 11))
    saves = (StateSave(req_id="a", num_tokens=8, block_ids=(40, 41)),)
    assert w.step([cold], count={"a": 8}, state_saves=saves) == {"a": []}
    assert w.kept(40, 41) == state_after(prompt[:8])
    assert w.step(cached={"a": 8}, count={"a": 6}) == {"a": []}
    saves = (StateSave(req_id="a", num_tokens=19, block_ids=(42, 43)),)
    assert w.step(cached={"a": 14}, count={"a": 5}, state_saves=saves) == {"a": after[:1]}
    assert w.kept(42, 43) == state_after(prompt)
    # Keys and values of the first 8 tokens lie in blocks 1 and 2.
    hit = new("b", prompt, [1, 2, *range(11, 19)], num_computed_tokens=8, state_block_ids=(40, 41))
    assert w.step([hit], cached={"a": 19}) == {"b": after[:1], "a": after[1:2]}
    for count in range(1, 4):
        assert w.step(cached={"b": 18 + count}) == {"b": after[count : count + 1]}
    assert w.kept(40, 41) == state_after(prompt[:8]), "the copy itself is not written"


def test_copies_of_several_requests_in_one_step(scripted):
    w = scripted([AFTER[1:4], [99, 99, 99]])
    other = [7, 7, 1]
    w.step([new("a", PROMPT, range(1, 8)), new("b", other, range(8, 15))])
    saves = (
        StateSave(req_id="b", num_tokens=4, block_ids=(20, 21)),
        StateSave(req_id="c", num_tokens=4, block_ids=(22, 23)),
        StateSave(req_id="a", num_tokens=8, block_ids=(24, 25)),
    )
    third = new("c", [6, 5, 4, 3], (15, 16))
    w.step([third], cached={"a": 5, "b": 3}, drafts={"a": 3, "b": 3}, state_saves=saves)
    assert w.kept(20, 21) == state_after([*other, *toy_tokens(other, 1)])
    assert w.kept(22, 23) == state_after([6, 5, 4, 3])
    assert w.kept(24, 25) == state_after([*PROMPT, *AFTER[:3]])


def test_a_slot_that_is_taken_again_starts_from_nothing(scripted):
    w = scripted([AFTER[1:4]])
    w.step([new("a", PROMPT, range(1, 11))])
    w.step(cached={"a": 5}, drafts={"a": 3})
    assert w.step([new("b", [4, 4], range(1, 11))], finished_req_ids=frozenset({"a"})) == {"b": toy_tokens([4, 4], 1)}
    assert w.step([new("c", PROMPT, range(11, 20))], cached={"b": 2}, preempted_req_ids=frozenset()) == {
        "c": AFTER[:1],
        "b": toy_tokens([4, 4], 2)[1:],
    }


def test_a_dummy_batch_reads_and_writes_no_requests_state(scripted):
    w = scripted()
    w.step([new("a", PROMPT, range(1, 11))])
    states = [tensor for layer in batches(w.assembly)[-1].states for tensor in layer]
    before = [tensor.clone() for tensor in states]
    w.worker.execute_dummy_batch()
    dummy = batches(w.assembly)[-1]
    assert dummy.initial.tolist() == [4 * 4], "the row behind the slots'"
    assert dummy.token_states.tolist() == [-1]
    assert all(torch.equal(one, other) for one, other in zip(before, states, strict=True))
    assert w.step(cached={"a": 5}) == {"a": AFTER[1:2]}


def test_where_the_rows_of_a_batch_lie(scripted):
    w = scripted([[7, 7, 7]])
    w.step([new("a", PROMPT, range(1, 11))], count={"a": 3})
    (first,) = batches(w.assembly)
    slot_a = int(first.token_states[2]) // 4
    assert first.initial.tolist() == [16]
    assert first.token_states.tolist() == [-1, -1, 4 * slot_a]
    w.step(cached={"a": 3}, count={"a": 2})
    w.step([new("b", [1, 2], range(11, 21))], cached={"a": 5}, drafts={"a": 2})
    last = batches(w.assembly)[-1]
    slot_b = int(last.token_states[4]) // 4
    assert slot_a != slot_b
    assert last.initial.tolist() == [4 * slot_a, 16]
    assert last.token_states.tolist() == [4 * slot_a, 4 * slot_a + 1, 4 * slot_a + 2, -1, 4 * slot_b]
    assert last.is_verifying_np.tolist() == [True, False]
    assert last.query_start_loc.tolist() == last.query_start_loc_np.tolist() == [0, 3, 5]
    assert [tuple(tensor.shape) for tensor in last.states[0]] == [(17, 3), (17, 1)]


# --- what is refused


def test_a_prefix_without_a_copy_of_its_state_is_refused(scripted):
    w = scripted()
    with pytest.raises(RequestError, match=r"'a' begins behind 4 computed tokens, and no copy"):
        w.step([new("a", PROMPT, (1, 2), num_computed_tokens=4)])


def test_a_copy_for_a_request_that_is_not_scheduled_is_refused(scripted):
    w = scripted()
    with pytest.raises(RequestError, match=r"state of request 'z' is asked for, which is not scheduled"):
        w.step([new("a", PROMPT, (1, 2))], state_saves=(StateSave(req_id="z", num_tokens=4, block_ids=(5, 6)),))


@pytest.mark.parametrize("name", ["none", "ascend"])
def test_a_model_state_that_keeps_none_is_refused_by_name(make, name):
    with pytest.raises(UnsupportedError, match=rf"model_state: {name}.*FakeForCausalLM.*recurrent.*auto_detect"):
        make(model_state=name).worker.start()


def test_graphs_of_the_device_are_refused(make):
    with pytest.raises(UnsupportedError, match=r"graph.*FakeForCausalLM has recurrent layers.*`graph: none`"):
        make(graph="cuda", device="fake", attention="sdpa").worker.start()


def test_a_draft_with_recurrent_layers_is_refused(make):
    limits = {"num_speculative_tokens": 2}
    with pytest.raises(UnsupportedError, match=r"components.draft: FakeForCausalLM has recurrent layers.*ngram"):
        make(limits=limits, speculator="draft_model", draft="target").worker.start()


@pytest.mark.parametrize("name", ["auto_detect", "ascend_mamba_hybrid"])
def test_both_names_serve_it(make, name):
    scheduler = {"use": "continuous", "prefix_caching": False}
    served(make(model_state=name, scheduler=scheduler), PROMPTS[:1])
    assert len(LAYERS) == 2
