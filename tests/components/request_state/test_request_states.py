"""Both request states: slots, plans, and what a step leaves behind."""

import random

import numpy as np
import pytest
import torch

from workerkit.components.input_batch.ascend import AscendInputBatcher
from workerkit.components.request_state.ascend import AscendRequestState
from workerkit.components.request_state.host import HostStates
from workerkit.framework.errors import IntegrityError, RequestError
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.graph import BatchDescriptor
from workerkit.framework.interfaces.request import CachedRequest, NewRequest, SchedulerOutput
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling import SamplerOutput
from workerkit.framework.interfaces.sampling_params import SamplingParams

SHAPE = WorkerShape(
    max_model_len=16, max_num_reqs=3, max_num_batched_tokens=12, vocab_size=50, num_speculative_tokens=2
)
CONTEXT = DeviceContext(device=torch.device("cpu"), dtype=torch.float32)


def new(req_id, tokens=(1, 2, 3), prompt_len=None, computed=0):
    return NewRequest(
        req_id=req_id,
        token_ids=tuple(tokens),
        prompt_len=len(tokens) if prompt_len is None else prompt_len,
        sampling=SamplingParams(),
        block_ids=((1,),),
        num_computed_tokens=computed,
    )


@pytest.fixture(params=["host", "ascend"])
def states(request):
    return HostStates(SHAPE) if request.param == "host" else AscendRequestState(SHAPE, CONTEXT)


def test_slots_are_stable_and_return_to_the_stack(states):
    slots = {name: states.add(new(name)) for name in "abc"}
    assert sorted(slots.values()) == [0, 1, 2]
    with pytest.raises(RequestError, match="max_num_reqs is 3"):
        states.add(new("d"))
    assert states.remove("b") == slots["b"]
    assert {name: states.slot(name) for name in states.req_ids} == {"a": slots["a"], "c": slots["c"]}
    assert "b" not in states
    assert states.add(new("d")) == slots["b"]
    states.check_integrity()


def test_unknown_and_repeated_ids_are_refused(states):
    states.add(new("a"))
    with pytest.raises(RequestError, match="'a' is already there"):
        states.add(new("a"))
    for call in (states.remove, states.slot):
        with pytest.raises(RequestError, match="'x' is not known"):
            call("x")
    with pytest.raises(RequestError, match="'x' is not known"):
        states.update(CachedRequest(req_id="x", num_computed_tokens=0))
    with pytest.raises(RequestError, match="'x' is not known"):
        states.plan(SchedulerOutput(num_scheduled_tokens={"x": 1}))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (new("a", ()), "0 tokens; right: 1 to max_model_len = 16"),
        (new("a", range(17)), "17 tokens"),
        (new("a", prompt_len=4), "prompt_len 4"),
        (new("a", computed=3), "num_computed_tokens 3; right: 0 to 2"),
        (new("a", (1, 50, 2)), "token id 50; right: 0 to 49"),
        (new("a", (1, -1, 2)), "token id -1"),
    ],
)
def test_a_bad_request_takes_no_slot(states, request_, message):
    with pytest.raises(RequestError, match=message):
        states.add(request_)
    assert states.req_ids == ()
    states.check_integrity()


def test_decode_and_verify_rows_come_first_and_ties_keep_their_order(states):
    states.add(new("prefill", range(5), computed=1))
    states.add(new("decode"))
    states.add(new("verify"))
    if isinstance(states, HostStates):
        for name in ("decode", "verify"):
            states.get(name).token_ids.append(7)
    states.update(CachedRequest(req_id="decode", num_computed_tokens=3))
    states.update(CachedRequest(req_id="verify", num_computed_tokens=3))
    plan = states.plan(
        SchedulerOutput(num_scheduled_tokens={"prefill": 2, "verify": 3, "decode": 1}, scheduled_drafts={"verify": 2})
    )
    assert plan.req_ids == ("verify", "decode", "prefill")
    assert plan.slots.tolist() == [states.slot(name) for name in plan.req_ids]
    assert plan.num_scheduled_tokens.tolist() == [3, 1, 2]
    assert plan.num_draft_tokens.tolist() == [2, 0, 0]
    assert plan.num_computed_tokens.tolist() == [3, 3, 1]
    assert plan.is_prefilling.tolist() == [False, False, True]
    assert plan.is_partial.tolist() == [False, False, True]  # 1 + 2 of 5


@pytest.mark.parametrize(
    ("scheduled", "drafts", "computed", "message"),
    [
        ({"a": 0}, {}, 0, "no token"),
        ({"a": 4}, {}, 0, "more tokens are scheduled than are known"),
        ({"a": 2}, {}, 3, "right is 1 token"),
        ({"a": 2}, {"a": 1}, 0, "prefill is not done"),
        ({"a": 4}, {"a": 3}, 3, "fewer drafts"),
        ({"a": 1}, {"b": 1}, 0, "requests that are not"),
        ({"a": 1}, {}, 16, "max_model_len = 16"),
        ({"a": 13}, {}, 0, "max_num_batched_tokens is 12"),
    ],
)
def test_a_contradictory_step_is_refused(states, scheduled, drafts, computed, message):
    states.add(new("a"))
    states.update(CachedRequest(req_id="a", num_computed_tokens=computed))
    with pytest.raises(RequestError, match=message):
        states.plan(SchedulerOutput(num_scheduled_tokens=scheduled, scheduled_drafts=drafts))


def test_v1_never_plans_past_the_known_tokens():
    states = HostStates(SHAPE)
    states.add(new("a"))
    states.update(CachedRequest(req_id="a", num_computed_tokens=3))
    with pytest.raises(RequestError, match="up to token 4, but 3 tokens are known"):
        states.plan(SchedulerOutput(num_scheduled_tokens={"a": 1}))


def test_v1_blocks_of_the_wrong_number_of_groups_change_nothing():
    states = HostStates(SHAPE)
    states.add(new("a"))
    with pytest.raises(RequestError, match="2 groups"):
        states.update(CachedRequest(req_id="a", num_computed_tokens=2, new_block_ids=((5,), (6,))))
    assert (states.get("a").block_ids, states.get("a").num_computed_tokens) == ([[1]], 0)


def test_v1_commits_tokens_and_keeps_drafts_until_then():
    states = HostStates(SHAPE)
    states.add(new("a"))
    plan = states.plan(SchedulerOutput(num_scheduled_tokens={"a": 3}))
    states.commit(plan, [[7]])
    states.store_drafts(plan, [[8, -1]])
    assert (states.get("a").token_ids, states.get("a").drafts) == ([1, 2, 3, 7], [8])
    states.update(CachedRequest(req_id="a", num_computed_tokens=3, new_block_ids=((4,),)))
    assert states.get("a").block_ids == [[1, 4]]
    plan = states.plan(SchedulerOutput(num_scheduled_tokens={"a": 2}, scheduled_drafts={"a": 1}))
    states.commit(plan, [[8, 9]])
    assert (states.get("a").token_ids, states.get("a").drafts) == ([1, 2, 3, 7, 8, 9], [])


def sampler_output(tokens, sampled, rejected):
    return SamplerOutput(
        token_ids=torch.tensor(tokens),
        num_sampled=torch.tensor(sampled, dtype=torch.int32),
        num_rejected=torch.tensor(rejected, dtype=torch.int32),
    )


def test_v2_commits_on_the_device():
    states = AscendRequestState(SHAPE, CONTEXT)
    builder = AscendInputBatcher(SHAPE, CONTEXT, states)
    for request in (new("a"), new("b", range(10, 20), prompt_len=8)):
        states.write(states.add(request), request)
    a, b = states.slot("a"), states.slot("b")
    batch = builder.build(
        states.plan(SchedulerOutput(num_scheduled_tokens={"a": 3, "b": 4})),
        BatchDescriptor(num_tokens=7, num_reqs=2),
    )
    states.commit(batch, sampler_output([[7], [49]], [1, 0], [0, 0]))
    states.store_drafts(batch, torch.tensor([[8, 9], [-1, -1]]))
    device = states.device
    assert device.all_token_ids[a].tolist() == [1, 2, 3, 7] + [0] * 12
    assert device.all_token_ids[b].tolist() == [*range(10, 20)] + [0] * 6  # a partial prefill keeps no token
    assert device.num_computed_tokens[[a, b]].tolist() == [3, 4]
    assert device.total_len[[a, b]].tolist() == [4, 10]
    assert device.last_sampled[[a, b]].tolist() == [7, 19]
    assert (device.prefill_len[b], device.prompt_len[b]) == (10, 8)

    # verify [7, 8, 9]: 8 is accepted, 5 drawn, 9 rejected; what lies past num_sampled is garbage
    states.update(CachedRequest(req_id="a", num_computed_tokens=3))
    batch = builder.build(
        states.plan(SchedulerOutput(num_scheduled_tokens={"a": 3}, scheduled_drafts={"a": 2})),
        BatchDescriptor(num_tokens=3, num_reqs=1),
    )
    assert batch.input_ids.tolist() == [7, 8, 9]
    states.commit(batch, sampler_output([[8, 5, -7]], [2], [1]))
    assert device.all_token_ids[a].tolist() == [1, 2, 3, 7, 8, 5] + [0] * 10
    assert (device.num_computed_tokens[a], device.total_len[a], device.last_sampled[a]) == (5, 6, 5)

    # the host is one step behind: its upper bound says 6, the device knows 5
    states.update(CachedRequest(req_id="a", num_computed_tokens=6))
    batch = builder.build(
        states.plan(SchedulerOutput(num_scheduled_tokens={"a": 1})), BatchDescriptor(num_tokens=1, num_reqs=1)
    )
    assert (batch.positions.tolist(), batch.input_ids.tolist(), batch.seq_lens.tolist()) == ([5], [5], [6])
    assert batch.host_seq_lens.upper_bound.tolist() == [7]
    assert batch.host_seq_lens.exact().tolist() == [6]


def test_v2_the_last_position_may_sample_more_than_fits():
    """A row that ends at max_model_len: its tokens count, nothing of the next slot is overwritten."""
    states = AscendRequestState(SHAPE, CONTEXT)
    builder = AscendInputBatcher(SHAPE, CONTEXT, states)
    requests = [new("a", range(14)), new("b", [9] * 16)]
    for request in requests:
        states.write(states.add(request), request)
    states.device.num_computed_tokens[states.slot("a")] = 13
    states.update(CachedRequest(req_id="a", num_computed_tokens=14))
    states.device.num_computed_tokens[states.slot("a")] = 14
    states.device.total_len[states.slot("a")] = 15
    batch = builder.build(
        states.plan(SchedulerOutput(num_scheduled_tokens={"a": 2}, scheduled_drafts={"a": 1})),
        BatchDescriptor(num_tokens=2, num_reqs=1),
    )
    states.commit(batch, sampler_output([[5, 6]], [2], [0]))
    assert states.device.all_token_ids[states.slot("a"), -1] == 5
    assert states.device.total_len[states.slot("a")] == 17
    assert states.device.all_token_ids[states.slot("b")].tolist() == [9] * 16


def test_v2_a_reused_slot_keeps_nothing_of_its_former_owner():
    states = AscendRequestState(SHAPE, CONTEXT)
    first = new("a", range(1, 17))
    slot = states.add(first)
    states.write(slot, first)
    states.device.draft_tokens[slot] = 3
    states.remove("a")
    states.check_integrity()
    second = new("b", (5, 6), prompt_len=1, computed=1)
    assert states.add(second) == slot
    states.write(slot, second)
    device = states.device
    assert device.all_token_ids[slot].tolist() == [5, 6] + [0] * 14
    values = (device.prefill_len, device.prompt_len, device.total_len, device.num_computed_tokens, device.last_sampled)
    assert [int(tensor[slot]) for tensor in values] == [2, 1, 2, 1, 6]
    assert device.draft_tokens[slot].tolist() == [-1, -1]


def test_v2_a_dummy_batch_and_misshapen_drafts_are_refused():
    states = AscendRequestState(SHAPE, CONTEXT)
    builder = AscendInputBatcher(SHAPE, CONTEXT, states)
    desc = BatchDescriptor(num_tokens=2, num_reqs=2)
    dummy = builder.dummy(2, 2, desc)
    with pytest.raises(IntegrityError, match="dummy"):
        states.commit(dummy, sampler_output([[1], [1]], [1, 1], [0, 0]))
    with pytest.raises(IntegrityError, match="dummy"):
        states.store_drafts(dummy, torch.zeros(2, 2, dtype=torch.int64))
    request = new("a")
    states.write(states.add(request), request)
    batch = builder.build(
        states.plan(SchedulerOutput(num_scheduled_tokens={"a": 2})), BatchDescriptor(num_tokens=2, num_reqs=1)
    )
    with pytest.raises(RequestError, match=r"\(1, 2\)"):
        states.store_drafts(batch, torch.zeros(1, 1, dtype=torch.int64))


def test_b125_nothing_is_left_after_many_requests(states):
    random_ = random.Random(0)
    for number in range(1000):
        if len(states.req_ids) == SHAPE.max_num_reqs or (states.req_ids and random_.random() < 0.4):
            states.remove(random_.choice(states.req_ids))
        states.add(new(f"r{number}", range(random_.randint(1, 16))))
        states.check_integrity()
    for req_id in states.req_ids:
        states.remove(req_id)
    states.check_integrity()
    assert states.req_ids == ()
    assert not [value for value in vars(states).values() if isinstance(value, dict) and value]


def test_integrity_notices_a_lost_slot(states):
    states.add(new("a"))
    states._slots._free.pop()
    with pytest.raises(IntegrityError, match="leak"):
        states.check_integrity()


def test_integrity_notices_what_the_slots_do_not_know():
    host = HostStates(SHAPE)
    host.add(new("a"))
    host._records["ghost"] = host.get("a")
    with pytest.raises(IntegrityError, match="ghost"):
        host.check_integrity()
    ascend = AscendRequestState(SHAPE, CONTEXT)
    ascend._prefill_len_np[2] = 4
    with pytest.raises(IntegrityError, match="remembers"):
        ascend.check_integrity()


def test_plan_arrays_are_fresh(states):
    states.add(new("a"))
    plan = states.plan(SchedulerOutput(num_scheduled_tokens={"a": 2}))
    states.update(CachedRequest(req_id="a", num_computed_tokens=2))
    states.remove("a")
    assert (plan.num_computed_tokens.tolist(), plan.prefill_lens.tolist()) == ([0], [3])
    assert plan.slots.dtype == np.int64


@pytest.mark.parametrize("kind", ["host", "ascend"])
def test_ties_keep_their_order_in_a_large_batch(kind):
    """Sorting a few rows is stable by accident; sorting many is not."""
    shape = WorkerShape(max_model_len=16, max_num_reqs=64, max_num_batched_tokens=64, vocab_size=50)
    states = HostStates(shape) if kind == "host" else AscendRequestState(shape, CONTEXT)
    names = [f"r{number}" for number in range(64)]
    random.Random(0).shuffle(names)
    for name in names:
        states.add(new(name, computed=1))
    decodes = names[::3]
    for name in decodes:
        if kind == "host":
            states.get(name).token_ids.append(7)
        states.update(CachedRequest(req_id=name, num_computed_tokens=3))
    plan = states.plan(SchedulerOutput(num_scheduled_tokens=dict.fromkeys(names, 1)))
    assert list(plan.req_ids) == decodes + [name for name in names if name not in decodes]
