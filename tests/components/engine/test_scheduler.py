import math
import random
from collections import Counter

import attrs
import pytest
from scheduler_driver import Driver

from workerkit.components.engine.scheduler import ContinuousScheduler, SchedulerConfig
from workerkit.framework.errors import IntegrityError, RequestError, StageError
from workerkit.framework.interfaces.engine import CacheIdentity, EngineRequest, MultimodalSpan, Progress
from workerkit.framework.interfaces.request import ModelRunnerOutput
from workerkit.framework.interfaces.sampling_params import SamplingParams


def request(req_id, prompt, stop_ids=(), **params):
    return EngineRequest(
        req_id=req_id,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**params),
        stop_ids=frozenset(stop_ids),
    )


@pytest.fixture
def driver(fakes):
    return lambda **kwargs: Driver(fakes, **kwargs)


# Random schedules


def random_identity(rng):
    """Mostly the plain one. Images lie within a block or reach across several."""
    if rng.random() < 0.8:
        return CacheIdentity()
    image = MultimodalSpan(start=rng.choice([0, 3, 6]), length=rng.choice([2, 5]), digest=rng.choice("pq"))
    return CacheIdentity(
        salt=rng.choice([None, "s"]), lora=rng.choice([None, "l"]), multimodal=rng.choice([(), (image,)])
    )


def random_groups(rng, kind):
    """(block sizes, options of the layout)."""
    if kind == "plain":
        return rng.choice([(1,), (2,), (4,), (16,), (2, 8), (4, 2), (3, 5, 4)]), {}
    block_sizes = rng.choice([(1,), (2,), (4,), (4, 4), (2, 8), (4, 2), (3, 1), (2, 2, 4)])
    windows = [rng.choice([None, 1, 2, 3, 5, 8, 13, 20]) for _ in block_sizes]
    options = {"windows": windows, "dtypes": [rng.choice(["float32", "int32"]) for _ in block_sizes]}
    if kind == "states":
        interval = math.lcm(*block_sizes) * rng.choice([1, 1, 2, 3])
        options |= {"state_blocks": rng.randint(1, 3), "state_interval": interval}
    return block_sizes, options


def random_case(driver, fakes, seed, kind="plain", speculative=False):
    rng = random.Random(seed)
    block_sizes, options = random_groups(rng, kind)
    shape = fakes.shape(
        max_model_len=rng.choice([12, 40]),
        max_num_reqs=rng.randint(1, 6),
        max_num_batched_tokens=rng.choice([1, 2, 3, 7, 16, 64]),
        num_speculative_tokens=rng.randint(1, 4) if speculative else 0,
    )
    step_tokens = shape.max_num_batched_tokens + (shape.num_speculative_tokens + 1 if speculative else 0)
    specs = [group.spec for group in fakes.layout(1, block_sizes, **options).groups]
    smallest = sum(spec.count_blocks(shape.max_model_len, step_tokens) for spec in specs)
    spare = rng.choice([0, 30]) if kind == "states" else 0
    layout = fakes.layout(1 + spare + rng.randint(smallest, 3 * smallest), block_sizes, **options)
    d = driver(
        shape=shape,
        layout=layout,
        chunked_prefill=shape.max_num_batched_tokens < shape.max_model_len or rng.random() < 0.5,
        async_scheduling=rng.random() < 0.5,
        prefix_caching=rng.random() < 0.8,
        policy=rng.choice(["fcfs", "priority"]),
    )
    families = [[rng.randrange(50) for _ in range(shape.max_model_len)] for _ in range(2)]
    names = [f"r{i}" for i in range(8)]
    for _ in range(120):
        action = rng.random()
        idle = [name for name in names if name not in d.live]
        if action < 0.3 and idle:
            length = rng.choice([8, 32, *(rng.randint(1, shape.max_model_len - 1) for _ in range(4))])
            length = min(length, shape.max_model_len - 1)
            common = rng.choice([0, length, length, rng.randint(0, length)])
            prompt = [*rng.choice(families)[:common], *(rng.randrange(50) for _ in range(length - common))]
            room = shape.max_model_len - len(prompt)
            d.add(
                rng.choice(idle),
                prompt,
                stop_ids=frozenset(rng.sample(range(50), rng.choice([0, 2]))),
                priority=rng.randrange(3),
                identity=random_identity(rng),
                max_tokens=rng.choice([None, rng.randint(1, room)]),
                seed=rng.randrange(3),
                prompt_logprobs=0 if rng.random() < 0.1 else None,
            )
        elif 0.3 <= action < 0.34 and d.live:
            req_id = rng.choice(sorted(d.live))
            assert d.abort(req_id)
            assert not d.abort(req_id)
            d.count["aborted"] += 1
        elif 0.34 <= action < 0.345:
            d.forget()
        elif len(d.in_flight) < d.scheduler.max_in_flight and rng.random() < 0.7:
            d.start()
        elif d.in_flight:
            d.collect()
    d.run()
    d.count["drafts"] = d.worker.num_draft_tokens
    d.count["accepted"] = d.worker.num_drafts_accepted
    d.count["placeholders"] = d.worker.num_placeholders
    d.count["async"] = d.scheduler.max_in_flight - 1
    d.count["saves"] = d.worker.num_saves
    d.count["saves that came to nothing"] = sum(len(o.state_saves) for o in d.worker.outputs) - d.worker.num_saves
    d.count["zeroed"] = d.worker.num_zeroed
    return d.count


@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("kind", ["windows", "states"])
def test_any_schedule_over_windows_and_states_yields_the_tokens_of_the_request_alone(driver, fakes, kind, speculative):
    """With blocks of several sizes, too, and as few of them as one request needs."""
    total = Counter()
    for seed in range(80):
        total += random_case(driver, fakes, seed, kind, speculative)
    print(dict(total))
    assert total["steps"] >= 6000
    assert total["preempted"] >= 15
    assert total["aborted"] >= 200
    assert total["zeroed"] >= 5000
    assert total["cached tokens"] >= 300
    assert 20 <= total["async"] <= 60
    assert total["copies"] >= 20 or kind == "states"
    assert total["saves"] >= 1000 or kind == "windows"
    assert total["accepted"] >= 1000 or not speculative
    assert total["saves that came to nothing"] >= 100 or kind == "windows" or not speculative


@pytest.mark.parametrize("speculative", [False, True])
def test_any_schedule_yields_the_tokens_of_the_request_alone(driver, fakes, speculative):
    total = Counter()
    for seed in range(200):
        total += random_case(driver, fakes, seed, speculative=speculative)
    print(dict(total))
    assert total["steps"] >= 15000
    assert total["preempted"] >= 150
    assert total["resumed hits"] >= 70
    assert total["cached tokens"] >= 2000
    assert total["copies"] >= 40
    assert total["aborted"] >= 400
    assert total["stop"] >= 200
    assert total["length"] >= 1000
    assert 60 <= total["async"] <= 140
    if speculative:
        assert total["drafts"] >= 2000
        assert 0.3 < total["accepted"] / total["drafts"] < 0.7
        assert total["placeholders"] >= 500
    else:
        assert not total["drafts"]
        assert not total["placeholders"]


# Batching


@pytest.mark.parametrize("budget", [1, 3, 5, 9, 10, 64])
def test_a_prompt_is_cut_to_the_budget(driver, fakes, budget):
    d = driver(shape=fakes.shape(max_num_batched_tokens=budget))
    d.add("a", range(10), max_tokens=2)
    chunks = []
    while not d.done:
        chunks.append(d.step().num_scheduled_tokens["a"])
    assert chunks == [budget] * (10 // budget) + [10 % budget] * bool(10 % budget) + [1]
    d.run()


def test_requests_share_a_step_in_the_order_of_arrival(driver, fakes):
    d = driver(shape=fakes.shape(max_num_reqs=2, max_num_batched_tokens=8))
    for name, prompt in (("a", range(6)), ("b", range(10, 16)), ("c", [20])):
        d.add(name, prompt, max_tokens=3)
    assert d.step().num_scheduled_tokens == {"a": 6, "b": 2}
    assert d.step().num_scheduled_tokens == {"a": 1, "b": 4}  # c has to wait for a row
    assert d.step().num_scheduled_tokens == {"a": 1, "b": 1}
    output = d.step()
    assert output.num_scheduled_tokens == {"b": 1, "c": 1}
    assert output.finished_req_ids == {"a"}
    d.run()


def test_blocks_are_announced_only_when_there_are_some(driver, fakes):
    """Block sizes 2 and 4: the first group grows at 4 and 6 tokens, the second at 4."""
    d = driver(layout=fakes.layout(64, (2, 4)))
    d.add("a", range(3), max_tokens=5)
    assert d.step().new_requests[0].block_ids == ((1, 2), (3,))
    grown = [d.step().cached_requests[0].new_block_ids for _ in range(4)]
    assert grown == [(), ((4,), (5,)), (), ((6,), ())]
    d.run()


def test_without_chunks_a_prompt_waits_for_a_step_of_its_own(driver, fakes):
    d = driver(shape=fakes.shape(max_num_batched_tokens=8), chunked_prefill=False)
    with pytest.raises(RequestError, match=r"9 tokens.*8 \(max_num_batched_tokens\).*chunked_prefill"):
        d.add("long", range(9))
    d.add("a", range(5), max_tokens=3)
    d.add("b", range(10, 18), max_tokens=1)
    assert d.step().num_scheduled_tokens == {"a": 5}
    assert d.step().num_scheduled_tokens == {"a": 1}
    assert d.step().num_scheduled_tokens == {"a": 1}
    assert d.step().num_scheduled_tokens == {"b": 8}
    d.run()


def test_without_chunks_a_preempted_request_that_outgrew_a_step_still_finishes(driver, fakes):
    d = driver(
        shape=fakes.shape(max_model_len=24, max_num_batched_tokens=6),
        layout=fakes.layout(1 + 24, (1,)),
        chunked_prefill=False,
    )
    d.add("a", range(3), max_tokens=12)
    d.add("b", range(3, 6), max_tokens=15)
    d.run()
    assert d.count["preempted"]
    assert {reason for _, reason in d.done.values()} == {"length"}


# Preemption


def test_the_last_arrived_is_preempted_and_comes_back_with_its_tokens(driver, fakes):
    d = driver(layout=fakes.layout(1 + 5, (4,)), shape=fakes.shape(max_model_len=20))
    d.add("old", range(6), max_tokens=9)
    d.add("young", range(10, 17), max_tokens=6)
    d.step()
    assert d.scheduler.stats()["num_free_blocks"] == 1
    d.step()
    d.step()  # young's ninth token takes the last block
    assert d.scheduler.stats()["num_free_blocks"] == 0
    generated = tuple(d.live["young"][3])
    assert len(generated) == 3
    output = d.step()  # old's ninth token needs one
    assert output.preempted_req_ids == {"young"}
    assert output.num_scheduled_tokens == {"old": 1}
    while not d.worker.outputs[-1].new_requests:
        d.step()
    (back,) = d.worker.outputs[-1].new_requests
    assert back.req_id == "young"
    assert back.prompt_len == 7
    assert back.token_ids == (*range(10, 17), *generated)
    d.run()
    assert d.scheduler.stats()["num_preemptions"] == 1


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_oldest_request_is_never_preempted(driver, fakes, async_scheduling):
    shape = fakes.shape(max_model_len=16, max_num_reqs=4)
    d = driver(shape=shape, layout=fakes.layout(1 + 17, (1,)), async_scheduling=async_scheduling)
    for i in range(6):
        d.add(f"{i}", [i], max_tokens=15)
    while d.live:
        oldest = next(iter(d.live))
        output = d.start()
        assert oldest not in output.preempted_req_ids
        if len(d.in_flight) == d.scheduler.max_in_flight or not output.num_scheduled_tokens:
            d.collect()
    assert list(d.done) == [f"{i}" for i in range(6)]
    assert d.count["preempted"] > 3
    d.run()


def test_blocks_of_an_aborted_request_are_waited_for_before_anyone_is_preempted(driver, fakes):
    d = driver(layout=fakes.layout(1 + 5, (1,)), shape=fakes.shape(max_model_len=6), async_scheduling=True)
    for token, name in enumerate("abc"):
        d.add(name, [token], max_tokens=5)
    d.start()
    assert d.start().num_scheduled_tokens == {"a": 1, "b": 1}  # no block for c, and none can be taken while in flight
    d.abort("b")
    d.collect()
    assert not d.start().num_scheduled_tokens
    d.collect()
    assert d.start().num_scheduled_tokens == {"a": 1, "c": 1}
    d.run()


def test_a_new_request_does_not_take_the_blocks_an_older_one_waits_for(driver, fakes):
    """One block is free, `a` needs one in each group, and `b` cannot be preempted while its step is in flight."""
    d = driver(layout=fakes.layout(1 + 9, (2, 2)), shape=fakes.shape(max_model_len=8), async_scheduling=True)
    d.add("a", [1, 6], max_tokens=4)
    d.add("b", [2, 3, 4, 5, 6], max_tokens=2)
    d.start()
    d.add("c", [5], max_tokens=1)
    assert d.scheduler.stats()["num_free_blocks"] == 1
    assert not d.start().num_scheduled_tokens
    d.collect()
    assert d.step().preempted_req_ids == {"b"}
    d.run()


# Priorities


def order_of_admission(d):
    order = []
    while d.live or d.in_flight:
        order += [new.req_id for new in d.step().new_requests]
    d.run()
    return "".join(order)


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "abcde"), ("priority", "cbdae")])
def test_who_is_admitted_first(driver, fakes, policy, order):
    d = driver(shape=fakes.shape(max_num_reqs=1), policy=policy)
    for token, (name, priority) in enumerate({"a": 2, "b": 1, "c": -3, "d": 1, "e": 2}.items()):
        d.add(name, [token], priority=priority, max_tokens=2)
    assert order_of_admission(d) == order


def test_the_least_urgent_is_preempted_although_it_came_first(driver, fakes):
    d = driver(layout=fakes.layout(1 + 5, (4,)), shape=fakes.shape(max_model_len=20), policy="priority")
    d.add("low", range(6), priority=1, max_tokens=9)
    d.step()
    d.add("high", range(10, 17), priority=0, max_tokens=6)
    output = d.step()
    assert output.num_scheduled_tokens == {"low": 1, "high": 7}
    while not output.preempted_req_ids:
        output = d.step()
    assert output.preempted_req_ids == {"low"}
    d.run()
    assert list(d.done) == ["high", "low"]


def test_the_most_urgent_gets_the_tokens_of_a_step_first(driver, fakes):
    d = driver(shape=fakes.shape(max_num_batched_tokens=8), policy="priority")
    d.add("low", range(20), priority=1, max_tokens=2)
    assert d.step().num_scheduled_tokens == {"low": 8}
    d.add("high", range(20, 39), priority=0, max_tokens=2)
    assert d.step().num_scheduled_tokens == {"low": 8}  # who runs comes before who waits
    assert d.step().num_scheduled_tokens == {"low": 4, "high": 4}
    assert d.step().num_scheduled_tokens == {"high": 8}
    d.run()


def test_an_urgent_request_that_waits_preempts_nobody(driver, fakes):
    d = driver(layout=fakes.layout(1 + 6, (4,)), shape=fakes.shape(max_num_reqs=1), policy="priority")
    d.add("low", range(6), priority=9, max_tokens=9)
    d.step()
    d.add("high", range(10, 17), priority=0, max_tokens=6)
    d.run()
    assert d.count["preempted"] == 0
    assert list(d.done) == ["low", "high"]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_most_urgent_request_is_never_preempted(driver, fakes, async_scheduling):
    shape = fakes.shape(max_model_len=16, max_num_reqs=4)
    d = driver(shape=shape, layout=fakes.layout(1 + 17, (1,)), async_scheduling=async_scheduling, policy="priority")
    for i in range(6):
        d.add(f"{i}", [i], priority=-i, max_tokens=15)
    while d.live:
        output = d.start()
        assert max(d.live) not in output.preempted_req_ids
        if len(d.in_flight) == d.scheduler.max_in_flight or not output.num_scheduled_tokens:
            d.collect()
    assert list(d.done) == [f"{i}" for i in range(5, -1, -1)]
    assert d.count["preempted"] > 3
    d.run()


# Admission


def test_b98_prompt_as_long_as_the_context(driver, fakes):
    d = driver(shape=fakes.shape(max_model_len=32))
    for length in (32, 33):
        with pytest.raises(RequestError, match=f"prompt has {length} tokens.* 32 "):
            d.add("a", [1] * length, max_tokens=1)
    d.add("a", [1] * 31, max_tokens=1)
    d.add("b", [1] * 31)
    d.run()
    assert [(len(tokens), reason) for tokens, reason in d.done.values()] == [(1, "length")] * 2


def test_b99_max_tokens_past_the_context(driver, fakes):
    d = driver(shape=fakes.shape(max_model_len=2048), layout=fakes.layout(1024))
    with pytest.raises(RequestError) as caught:
        d.add("a", [1] * 8, max_tokens=2045)
    assert all(number in str(caught.value) for number in ("2048", " 8 ", "2045"))
    assert "-" not in str(caught.value)
    d.add("a", [1] * 8, max_tokens=2040)
    d.abort("a")
    d.run()


def test_what_cannot_be_served_is_refused_and_leaves_nothing(driver, fakes):
    d = driver(layout=fakes.layout(1 + 4, (4,)))
    for prompt, message in (
        ([], "empty"),
        ([1, 50], "prompt token 50 at position 1.*0 to 49"),
        ([-1], "prompt token -1"),
        ([1, 2.5], "token ids"),
        ([1] * 15, "15 prompt tokens and up to 3 more need 5 blocks, the whole cache has 4"),
    ):
        with pytest.raises(RequestError, match=message):
            d.scheduler.add(request("a", prompt, max_tokens=3))
    d.check_empty()
    d.add("a", [1] * 14, max_tokens=3)  # the 17th token is never computed
    with pytest.raises(RequestError, match="'a' is in use"):
        d.scheduler.add(request("a", [1], max_tokens=1))
    d.run()


# The end of a request


def test_b125_finished_ids_reach_an_idle_worker(driver):
    d = driver()
    d.add("a", [1, 2], max_tokens=1)
    d.step()
    assert not d.scheduler.has_requests
    assert d.scheduler.has_work
    assert set(d.worker.requests) == {"a"}
    assert d.step().finished_req_ids == {"a"}
    assert not d.worker.requests
    d.check_empty()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_b125_a_thousand_requests_leave_nothing(driver, async_scheduling):
    d = driver(async_scheduling=async_scheduling)
    for i in range(1000):
        d.add(f"{i}", [i % 50], max_tokens=1 + i % 2)
        if i % 3 == 0:
            d.abort(f"{i - i % 7}")
    d.run(limit=20000)


def test_b59_abort_while_its_step_is_in_flight(driver):
    """The blocks come back once, and only when no step in flight can write them any more."""
    d = driver(async_scheduling=True)
    d.add("a", range(7), max_tokens=9)
    free = d.scheduler.stats()["num_free_blocks"]
    d.start()
    d.start()
    assert d.abort("a")
    assert not d.abort("a")
    assert d.scheduler.stats()["num_free_blocks"] == free - 2
    d.collect()
    assert d.scheduler.stats()["num_free_blocks"] == free - 2
    d.collect()
    assert d.scheduler.stats()["num_free_blocks"] == free
    assert not d.scheduler.abort("a")
    d.run()


def test_b59_abort_after_the_end_and_of_the_unknown(driver):
    d = driver()
    d.add("a", [1], max_tokens=1)
    d.step()
    assert not d.abort("a")
    assert not d.abort("never")
    d.run()


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("others", [False, True], ids=["alone", "among others"])
@pytest.mark.parametrize("state", ["waiting", "in a chunk", "between chunks", "in flight", "decoding", "preempted"])
def test_b59_abort_in_any_state(driver, fakes, async_scheduling, others, state):
    """Whatever it was doing: it is gone at once, its blocks come back once, and its id is free for another."""
    shape = fakes.shape(max_model_len=16, max_num_batched_tokens=4)
    d = driver(shape=shape, layout=fakes.layout(1 + 16, (1,)), async_scheduling=async_scheduling)
    if others or state == "preempted":
        d.add("other", range(20, 26), max_tokens=10)
        d.step()
        d.step()
    d.add("x", range(6), max_tokens=10)
    if state == "in a chunk":
        assert 0 < d.start().num_scheduled_tokens["x"] < 6
    elif state == "between chunks":
        assert 0 < d.step().num_scheduled_tokens["x"] < 6
    elif state == "in flight":
        d.step()
        d.step()
        assert d.start().num_scheduled_tokens["x"]
    elif state == "decoding":
        while not d.live["x"][3]:
            d.step()
    elif state == "preempted":
        while "x" not in d.step().preempted_req_ids:
            pass
    assert d.abort("x")
    assert not d.abort("x")
    d.check()
    d.add("x", range(30, 34), max_tokens=3)
    d.run()
    assert not d.abort("x")
    assert len(d.done["x"][0]) == 3


def test_an_id_is_in_use_until_its_request_ends(driver):
    d = driver()
    d.add("a", [1, 2], max_tokens=2)
    for _ in range(2):
        with pytest.raises(RequestError, match="'a' is in use"):
            d.scheduler.add(request("a", [3], max_tokens=1))
        d.step()
    d.add("a", [3], max_tokens=1)
    d.run()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_b60_an_id_is_used_again_before_the_worker_heard_of_the_abort(driver, async_scheduling):
    d = driver(async_scheduling=async_scheduling)
    d.add("x", range(5), max_tokens=9)
    d.start()
    d.abort("x")
    d.add("x", range(10, 13), max_tokens=4)
    if not async_scheduling:
        d.collect()
    output = d.start()
    assert output.finished_req_ids == {"x"}
    assert output.new_requests[0].token_ids == (10, 11, 12)
    d.run()
    assert len(d.done["x"][0]) == 4


def test_b60_a_request_that_never_ran_is_not_reported(driver):
    d = driver()
    d.add("x", [1], max_tokens=1)
    d.abort("x")
    assert not d.scheduler.has_work


def test_abort_of_a_preempted_request_is_not_reported_twice(driver, fakes):
    d = driver(shape=fakes.shape(max_model_len=16), layout=fakes.layout(1 + 16, (1,)))
    d.add("a", [1] * 6, max_tokens=10)
    d.add("b", [2] * 6, max_tokens=10)
    while "b" not in d.step().preempted_req_ids:
        pass
    d.abort("b")
    assert not d.step().finished_req_ids
    d.run()


@pytest.mark.parametrize(
    ("stop_ids", "max_tokens", "kept", "reason"),
    [((), 9, 4, None), ((22,), 9, 2, "stop"), ((), 4, 4, "length"), ((23,), 4, 3, "stop"), ((20,), 9, 0, "stop")],
)
def test_tokens_past_the_end_are_cut(fakes, stop_ids, max_tokens, kept, reason):
    """A step with 3 drafts yields 4 tokens, 20 to 23, of which a request keeps those before its end."""
    scheduler = speculating(fakes, 3)
    scheduler.add(request("a", [1], stop_ids, max_tokens=max_tokens + 1))
    first = scheduler.schedule()
    assert not first.scheduled_drafts
    scheduler.update(first, answer(a=((5,), (20, 21, 22))))
    second = scheduler.schedule()
    assert second.num_scheduled_tokens == {"a": 4}
    assert second.scheduled_drafts == {"a": 3}
    progress = scheduler.update(second, answer(a=((20, 21, 22, 23), ())))
    assert progress == {"a": Progress(token_ids=(20, 21, 22, 23)[:kept], finish_reason=reason)}
    assert scheduler.has_requests == (reason is None)


# Drafts


def speculating(fakes, num_drafts, num_blocks=64, async_scheduling=False, policy="fcfs", **shape):
    shape = fakes.shape(num_speculative_tokens=num_drafts, **shape)
    config = SchedulerConfig(async_scheduling=async_scheduling, policy=policy)
    return ContinuousScheduler(config, shape, fakes.layout(num_blocks))


def answer(**rows):
    """Of each request: sampled tokens, and drafts."""
    return ModelRunnerOutput(
        req_ids=tuple(rows),
        sampled_token_ids=tuple(sampled for sampled, _ in rows.values()),
        draft_token_ids=tuple(drafts for _, drafts in rows.values()),
    )


@pytest.mark.parametrize("drafts", [(), (7,), (7, 8), (7, 8, 9)])
def test_as_many_drafts_are_scheduled_as_the_worker_holds(fakes, drafts):
    scheduler = speculating(fakes, 3)
    scheduler.add(request("a", [1]))
    scheduler.update(scheduler.schedule(), answer(a=((5,), drafts)))
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"a": 1 + len(drafts)}
    assert step.scheduled_drafts == ({"a": len(drafts)} if drafts else {})


@pytest.mark.parametrize("left", [1, 2, 3, 4, 9])
def test_drafts_stay_within_what_a_request_may_still_produce(fakes, left):
    """With one token left a draft would be for nothing: the token itself comes anyway."""
    scheduler = speculating(fakes, 3)
    scheduler.add(request("a", [1], max_tokens=1 + left))
    scheduler.update(scheduler.schedule(), answer(a=((5,), (7, 8, 9))))
    assert scheduler.schedule().scheduled_drafts.get("a", 0) == min(3, left - 1)


def test_placeholders_stand_for_drafts_that_are_not_known_yet(fakes):
    """With asynchronous scheduling: K while the request's last step is in flight, what it holds where none is."""
    scheduler = speculating(fakes, 3, async_scheduling=True)
    scheduler.add(request("a", [1], max_tokens=20))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second.scheduled_drafts == {"a": 3}
    scheduler.update(first, answer(a=((5,), (7,))))
    scheduler.update(second, answer(a=((7, 8), (9, 9))))
    assert scheduler.stats()["num_draft_tokens"] == 1
    assert scheduler.schedule().scheduled_drafts == {"a": 2}


def test_a_placeholder_is_never_accepted(fakes):
    scheduler = speculating(fakes, 3, async_scheduling=True)
    scheduler.add(request("a", [1], max_tokens=20))
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.update(first, answer(a=((5,), (7,))))
    with pytest.raises(IntegrityError, match="returned 3 tokens for 'a', right would be 1 to 2"):
        scheduler.update(second, answer(a=((7, 8, 9), ())))


def test_a_request_that_comes_back_has_no_drafts(fakes):
    scheduler = speculating(fakes, 2, num_blocks=1 + 8, max_model_len=24)
    for token, name in enumerate("ab"):
        scheduler.add(request(name, [token] * 8, max_tokens=16))
    step, drafts = scheduler.schedule(), set()
    while not step.preempted_req_ids:
        drafts.add(step.scheduled_drafts.get("b"))
        scheduler.update(step, answer(a=((5,), (5, 5)), b=((5,), (5, 5))))
        step = scheduler.schedule()
    assert drafts == {None, 2}
    assert step.preempted_req_ids == {"b"}
    scheduler.abort("a")
    scheduler.update(step, answer(a=((5,), ())))
    step = scheduler.schedule()
    assert set(step.num_scheduled_tokens) == {"b"}
    assert not step.scheduled_drafts


def test_drafts_are_cut_before_a_prompt_waits(fakes):
    """T = 12: two decodes and a prompt of 6 tokens leave 4 for drafts, which are shared evenly; one of 10 leaves none,
    and of a longer one a piece fills the step."""
    scheduler = speculating(fakes, 4, max_num_batched_tokens=12)
    drafts = (7, 8, 9, 10)
    for name in "ab":
        scheduler.add(request(name, [1]))
    scheduler.update(scheduler.schedule(), answer(a=((5,), drafts), b=((5,), drafts)))
    for name, prompt_len, expected in (("c", 6, [(3, 2), (3, 2), (6, 0)]), ("d", 20, [(1, 0), (1, 0), (1, 0), (9, 0)])):
        scheduler.add(request(name, [prompt_len] * prompt_len, max_tokens=9))
        step = scheduler.schedule()
        counts = step.num_scheduled_tokens
        assert [(counts[r], step.scheduled_drafts.get(r, 0)) for r in counts] == expected
        partial = counts.get("d", 0)
        scheduler.update(step, answer(**{r: ((), ()) if r == "d" and partial else ((5,), drafts) for r in counts}))
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"a": 1, "b": 1, "c": 1, "d": 9}


@pytest.mark.parametrize(("budget", "expected"), [(3, [0, 0, 0]), (5, [1, 1, 0]), (7, [2, 1, 1]), (9, [3, 2, 1])])
def test_drafts_share_what_is_left_evenly(fakes, budget, expected):
    """Three requests with 4, 4 and 1 drafts."""
    scheduler = speculating(fakes, 4, max_num_batched_tokens=budget)
    held = {"a": (7,) * 4, "b": (7,) * 4, "c": (7,)}
    for name in held:
        scheduler.add(request(name, [1]))
    scheduler.update(scheduler.schedule(), answer(**{name: ((5,), drafts) for name, drafts in held.items()}))
    step = scheduler.schedule()
    assert [step.scheduled_drafts.get(name, 0) for name in held] == expected
    assert step.total_num_scheduled_tokens == budget


def test_a_request_that_sits_a_step_out_keeps_its_drafts(fakes):
    """A more urgent prompt takes the whole step."""
    scheduler = speculating(fakes, 2, policy="priority", max_num_batched_tokens=4)
    scheduler.add(attrs.evolve(request("low", [1]), priority=1))
    scheduler.update(scheduler.schedule(), answer(low=((5,), (7, 8))))
    scheduler.add(request("high", [2] * 7))
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"low": 1, "high": 3}
    scheduler.update(step, answer(low=((5,), (7, 8)), high=((), ())))
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"high": 4}
    scheduler.update(step, answer(high=((5,), ())))
    assert scheduler.schedule().num_scheduled_tokens == {"high": 1, "low": 3}


def test_blocks_reach_k_plus_1_positions_ahead(fakes):
    """DraftInputs.tables promises it, up to the end of the context. Blocks of 4, K = 3."""
    scheduler = speculating(fakes, 3, num_blocks=1 + 4, max_model_len=15)
    scheduler.add(request("a", [1] * 4))
    step = scheduler.schedule()
    assert step.new_requests[0].block_ids == ((1, 2),)  # 4 computed, 4 ahead
    grown = {}
    for _ in range(10):
        scheduler.update(step, answer(a=((5,), (7, 8))))
        step = scheduler.schedule()
        (row,) = step.cached_requests
        grown[row.num_computed_tokens + step.num_scheduled_tokens["a"]] = row.new_block_ids
    assert step.scheduled_drafts == {}  # one token is left
    assert grown == {7: ((3,),), 8: (), 9: ((4,),), 10: (), 11: (), 12: (), 13: (), 14: ()}


@pytest.mark.parametrize(("num_blocks", "fits"), [(5, False), (6, True)])
def test_the_look_ahead_counts_when_a_request_is_added(fakes, num_blocks, fits):
    """13 prompt tokens and 4 more: 16 are computed, and 4 positions lie ahead."""
    scheduler = speculating(fakes, 3, num_blocks=num_blocks)
    if fits:
        scheduler.add(request("a", [1] * 13, max_tokens=4))
        assert len(scheduler.schedule().new_requests[0].block_ids[0]) == 5
        return
    with pytest.raises(RequestError, match="need 5 blocks, the whole cache has 4"):
        scheduler.add(request("a", [1] * 13, max_tokens=4))


def test_the_look_ahead_counts_when_a_request_is_admitted(fakes):
    scheduler = speculating(fakes, 3, num_blocks=1 + 5)
    scheduler.add(request("a", [1] * 8, max_tokens=1))
    scheduler.add(request("b", [2] * 5, max_tokens=1))
    assert set(scheduler.schedule().num_scheduled_tokens) == {"a"}  # three blocks; b needs three


def test_nobody_is_preempted_for_drafts(fakes):
    """One block is left, which `a` takes for its drafts; `b` goes on without."""
    scheduler = speculating(fakes, 3, num_blocks=1 + 5)
    for token, name in enumerate("ab"):
        scheduler.add(request(name, [token] * 3, max_tokens=5))
    step = scheduler.schedule()
    assert [len(new.block_ids[0]) for new in step.new_requests] == [2, 2]
    scheduler.update(step, answer(a=((5,), (7, 8)), b=((5,), (7, 8))))
    step = scheduler.schedule()
    assert not step.preempted_req_ids
    assert step.num_scheduled_tokens == {"a": 3, "b": 1}
    assert step.scheduled_drafts == {"a": 2}
    scheduler.check_integrity()


def test_b127_drafts_are_counted(fakes):
    """B127: K = 3, of which 0, 3 and 1 are accepted in three steps."""
    scheduler = speculating(fakes, 3)
    scheduler.add(request("a", [1], max_tokens=40))
    scheduler.update(scheduler.schedule(), answer(a=((5,), (7, 8, 9))))
    for sampled in ((6,), (7, 8, 9, 10), (7, 6)):
        scheduler.update(scheduler.schedule(), answer(a=(sampled, (7, 8, 9))))
    scheduler.update(scheduler.schedule(), answer(a=((6,), ())))
    scheduler.update(scheduler.schedule(), answer(a=((6,), ())))  # nothing to verify: no draft
    stats = scheduler.stats()
    assert (stats["num_drafts"], stats["num_draft_tokens"], stats["num_accepted_tokens"]) == (4, 12, 4)


# Tokens out of bounds


@pytest.mark.parametrize("bad", [50, -1])
def test_b117_a_token_outside_the_vocabulary_ends_its_request_alone(driver, bad):
    """-1 is what a sampler draws when no token is possible."""
    d = driver()
    d.add("a", [1], max_tokens=3)
    d.add("b", [2], max_tokens=3)
    output = d.scheduler.schedule()
    answer = ModelRunnerOutput(req_ids=("a", "b"), sampled_token_ids=((bad,), (7,)))
    assert d.scheduler.update(output, answer) == {
        "a": Progress(token_ids=(), finish_reason="error"),
        "b": Progress(token_ids=(7,)),
    }
    d.scheduler.check_integrity()
    assert d.scheduler.stats()["num_running"] == 1


# Asynchronous scheduling


def test_whether_a_config_plans_ahead():
    assert ContinuousScheduler.plans_ahead(SchedulerConfig(async_scheduling=True))
    assert not ContinuousScheduler.plans_ahead(SchedulerConfig())


def test_a_step_is_planned_before_the_last_ones_tokens_are_known(driver):
    d = driver(async_scheduling=True)
    d.add("a", [1, 2, 3], max_tokens=3)
    d.start()
    second = d.start()
    assert second.cached_requests[0].num_computed_tokens == 3
    assert second.num_scheduled_tokens == {"a": 1}
    with pytest.raises(StageError, match="2 steps are in flight"):
        d.scheduler.schedule()
    d.collect()
    third = d.start()
    assert third.cached_requests[0].num_computed_tokens == 4
    d.collect()
    assert not d.start().num_scheduled_tokens, "all three tokens were on their way"
    d.run()


def test_tokens_that_arrive_after_the_end_are_dropped(driver, fakes):
    d = driver(async_scheduling=True)
    first = fakes.next_token((1, 2), 0, 50)
    d.add("a", [1, 2], stop_ids=frozenset([first]), max_tokens=9)
    d.start()
    d.start()
    d.collect()
    assert d.done == {"a": ((), "stop")}
    d.collect()
    d.run()


def test_the_synchronous_scheduler_has_one_step_in_flight(driver):
    d = driver()
    d.add("a", [1], max_tokens=3)
    d.start()
    with pytest.raises(StageError, match="1 steps are in flight"):
        d.scheduler.schedule()


# Answers that contradict the step


@pytest.mark.parametrize(
    ("req_ids", "sampled", "message"),
    [
        (("a", "ghost"), ((1,), (1,)), "not in the step.*ghost"),
        (("a",), ((),), "returned 0 tokens for 'a'"),
        ((), (), "returned 0 tokens for 'a'"),
        (("a",), ((1, 2),), "returned 2 tokens for 'a'"),
    ],
)
def test_a_wrong_answer_changes_nothing(driver, req_ids, sampled, message):
    d = driver()
    d.add("a", [1], max_tokens=3)
    output = d.start()
    with pytest.raises(IntegrityError, match=message):
        d.scheduler.update(output, ModelRunnerOutput(req_ids=req_ids, sampled_token_ids=sampled))
    d.check()
    d.collect()
    d.run()


def test_steps_are_updated_in_order_and_once(driver):
    d = driver(async_scheduling=True)
    d.add("a", [1], max_tokens=5)
    d.start()
    second = d.start()
    answer = ModelRunnerOutput(req_ids=("a",), sampled_token_ids=((1,),))
    with pytest.raises(StageError, match="in the order"):
        d.scheduler.update(second, answer)
    first = d.in_flight[0][0]
    d.collect()
    with pytest.raises(StageError, match="each once"):
        d.scheduler.update(first, answer)
    d.run()


def test_a_block_that_is_shared_and_may_be_written_is_found(driver):
    d = driver()
    d.add("a", range(6), max_tokens=3)
    d.step()
    (blocks,) = d.scheduler._requests["a"].block_ids
    pool = d.scheduler._blocks._pool
    pool.publish(blocks[1], (0, b"half full"))
    with pytest.raises(IntegrityError, match=r"\[2\] may still be written"):
        d.scheduler.check_integrity()


def test_a_lost_block_is_found(driver):
    d = driver()
    d.add("a", [1, 2], max_tokens=3)
    d.step()
    d.scheduler._blocks._pool.allocate(1)
    with pytest.raises(IntegrityError, match="lost"):
        d.scheduler.check_integrity()
