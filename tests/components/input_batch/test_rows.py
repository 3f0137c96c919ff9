"""V1's rows: condensing, order, stale tails; and what both batches do with padding and dummies."""

import numpy as np
import pytest
import torch

from workerkit.components.block_table.multi_group import MultiGroupBlockTable
from workerkit.components.input_batch.ascend import AscendInputBatcher
from workerkit.components.input_batch.persistent import NPUInputBatch
from workerkit.components.request_state.ascend import AscendRequestState
from workerkit.components.request_state.host import HostStates
from workerkit.framework.errors import IntegrityError, UnsupportedError
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.graph import BatchDescriptor
from workerkit.framework.interfaces.kv_cache import KVCacheGroup, KVCacheSpec, KVLayout
from workerkit.framework.interfaces.request import CachedRequest, NewRequest, SchedulerOutput
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling_params import SamplingParams

SHAPE = WorkerShape(
    max_model_len=32, max_num_reqs=8, max_num_batched_tokens=32, vocab_size=100, num_speculative_tokens=2
)
CONTEXT = DeviceContext(device=torch.device("cpu"), dtype=torch.float32)
LAYOUT = KVLayout(
    num_blocks=100,
    groups=tuple(
        KVCacheGroup(
            spec=KVCacheSpec(num_kv_heads=1, head_dim=4, dtype="float32", block_size=size, element_bytes=4), layers=(i,)
        )
        for i, size in enumerate((8, 4))
    ),
    kernel_block_size=4,
)


class Rows:
    """V1's three parts, and the runner's calls on them."""

    def __init__(self):
        self.states = HostStates(SHAPE)
        self.tables = MultiGroupBlockTable(SHAPE, CONTEXT, LAYOUT)
        self.batch = NPUInputBatch(SHAPE, CONTEXT, self.tables, LAYOUT)

    def add(self, req_id, tokens, computed=0):
        first = tokens[0]
        request = NewRequest(
            req_id=req_id,
            token_ids=tuple(tokens),
            prompt_len=len(tokens),
            sampling=SamplingParams(),
            block_ids=((first, first + 1, first + 2, first + 3), tuple(range(first + 10, first + 18))),
            num_computed_tokens=computed,
        )
        self.states.add(request)

    def leave(self, req_id):
        self.batch.remove(req_id)
        self.states.remove(req_id)

    def step(self, scheduled, pad=(0, 0), drafts=None):
        plan = self.states.plan(SchedulerOutput(num_scheduled_tokens=scheduled, scheduled_drafts=drafts or {}))
        self.batch.sync(plan, self.states)
        self.batch.check_integrity(self.states)
        num_tokens, num_reqs = max(pad[0], plan.num_tokens), max(pad[1], plan.num_reqs)
        return self.batch.build(plan, BatchDescriptor(num_tokens=num_tokens, num_reqs=num_reqs))

    def snapshot(self):
        """Everything that is kept by row."""
        return [
            (tokens.tolist(), int(count), record.request.req_id, list(blocks), self.tables.block_ids(row))
            for row, (tokens, count, record, blocks) in enumerate(
                zip(
                    self.batch.token_ids_cpu,
                    self.batch.num_tokens,
                    self.batch._records,
                    self.batch._num_blocks,
                    strict=False,
                )
            )
        ]


@pytest.fixture
def rows():
    return Rows()


def test_b110_condensing_leaves_nothing_behind(rows):
    rows.add("a", range(1, 6))
    rows.add("b", range(20, 30))
    rows.step({"a": 5, "b": 10})
    b = rows.snapshot()[1]
    rows.leave("a")
    assert rows.snapshot() == [b]
    assert not rows.batch.token_ids_cpu[1:].any()
    assert rows.tables.block_ids(1) == ((), ())
    assert rows.batch.row_moves == 1
    rows.add("c", [40, 41])
    rows.states.get("b").token_ids.append(7)
    rows.states.update(CachedRequest(req_id="b", num_computed_tokens=10))
    batch = rows.step({"c": 2, "b": 1})
    assert rows.batch.token_ids_cpu[1].tolist() == [40, 41] + [0] * 30
    assert batch.req_ids == ("b", "c")
    assert batch.input_ids.tolist() == [7, 40, 41]


def test_b111_a_swap_exchanges_every_per_row_array(rows):
    rows.add("a", range(1, 9))
    rows.add("b", range(20, 24))
    rows.step({"a": 8, "b": 4})
    a, b = rows.snapshot()
    for name in ("a", "b"):  # a new kind of per-row state has to be added to this test
        assert {key for key, value in vars(rows.batch).items() if isinstance(value, (np.ndarray, list))} == {
            "token_ids_cpu",
            "num_tokens",
            "_records",
            "_num_blocks",
        }, name
    rows.batch._swap(0, 1)
    assert rows.snapshot() == [b, a]
    assert rows.batch._rows == {"b": 0, "a": 1}
    rows.batch.check_integrity(rows.states)


def test_rows_follow_the_plan_and_unscheduled_requests_leave_them(rows):
    for number, name in enumerate("abcd"):
        rows.add(name, range(10 * number + 1, 10 * number + 6))
    rows.step(dict.fromkeys("abcd", 4))
    moves = rows.batch.row_moves
    assert moves == 0
    for name in "bd":
        rows.states.update(CachedRequest(req_id=name, num_computed_tokens=4))
    batch = rows.step({"d": 1, "b": 1})
    assert batch.req_ids == ("d", "b")
    assert batch.input_ids.tolist() == [35, 15]
    assert batch.positions.tolist() == [4, 4]
    assert rows.batch.row_moves > moves
    assert rows.tables.block_ids(2) == ((), ())
    rows.states.update(CachedRequest(req_id="a", num_computed_tokens=4))  # and comes back
    assert rows.step({"a": 1}).input_ids.tolist() == [5]


def test_a_request_that_returns_under_its_id_gets_a_new_row(rows):
    """Preempted and resumed with more tokens, even when nobody called `remove` on the batch."""
    rows.add("a", range(1, 6))
    rows.step({"a": 5})
    rows.states.remove("a")
    rows.add("a", [50, 51, 52, 53, 54, 55, 56])
    assert rows.step({"a": 7}).input_ids.tolist() == [50, 51, 52, 53, 54, 55, 56]
    assert rows.tables.block_ids(0)[0][:2] == (100, 101)


def test_new_blocks_and_tokens_reach_the_row(rows):
    request = NewRequest(
        req_id="a", token_ids=(1, 2, 3), prompt_len=3, sampling=SamplingParams(), block_ids=((5,), (7,))
    )
    rows.states.add(request)
    batch = rows.step({"a": 3})
    rows.states.commit(batch.plan, [[9]])
    rows.batch.check_integrity(rows.states)  # the row lags behind until the next sync
    rows.states.update(CachedRequest(req_id="a", num_computed_tokens=3, new_block_ids=((), (8,))))
    assert rows.step({"a": 1}).input_ids.tolist() == [9]
    assert rows.tables.block_ids(0) == ((10, 11), (7, 8))


def test_drafts_are_the_rows_last_tokens(rows):
    rows.add("a", [1, 2, 3])
    rows.add("b", [50, 51])
    batch = rows.step({"a": 3, "b": 2})
    assert batch.logits_indices.tolist() == [2, 4]
    rows.states.commit(batch.plan, [[4], [52]])
    rows.states.store_drafts(batch.plan, [[5, 6], [-1, -1]])
    for name, computed in (("a", 3), ("b", 2)):
        rows.states.update(CachedRequest(req_id=name, num_computed_tokens=computed))
    batch = rows.step({"a": 3, "b": 2}, drafts={"a": 2, "b": 1})
    assert batch.input_ids.tolist() == [4, 5, 6, 52, 0]  # a draft that nobody proposed is token 0
    assert batch.logits_indices.tolist() == [0, 1, 2, 3, 4]
    assert batch.logits_rows.tolist() == [0, 0, 0, 1, 1]
    assert batch.cu_num_logits_np.tolist() == [0, 3, 5]
    assert batch.num_logits == 5
    rows.states.commit(batch.plan, [[5, 30], [53]])  # 5 accepted, 6 rejected
    rows.states.update(CachedRequest(req_id="a", num_computed_tokens=5))
    assert rows.step({"a": 1}).input_ids.tolist() == [30]


def test_b162_padding_repeats_the_last_value_and_lengths_stay_monotone(rows):
    for number in range(4):
        rows.add(f"r{number}", [number + 1, 2], computed=1)
    rows.step({f"r{number}": 1 for number in range(4)}, pad=(8, 8))
    rows.leave("r3")
    rows.add("new", range(60, 70))
    for number in range(3):
        rows.states.get(f"r{number}").token_ids.append(9)
        rows.states.update(CachedRequest(req_id=f"r{number}", num_computed_tokens=2))
    batch = rows.step({"r0": 1, "r1": 1, "new": 10, "r2": 1}, pad=(16, 8))
    assert batch.query_start_loc.tolist() == [0, 1, 2, 3, 13, 13, 13, 13, 13]
    assert batch.query_start_loc_np.tolist() == batch.query_start_loc.tolist()
    assert batch.seq_lens.tolist() == [3, 3, 3, 10, 0, 0, 0, 0]
    for tensor in (batch.input_ids, batch.positions, batch.rope_lens, batch.token_rows):
        assert tensor.shape == (16,)
        assert tensor[13:].tolist() == [0, 0, 0]
    assert batch.idx_mapping.tolist() == [rows.states.slot(name) for name in batch.req_ids]
    assert (batch.max_query_len, batch.num_reqs, batch.num_tokens) == (10, 4, 13)


def test_rope_lengths_know_the_prompt_ahead(rows):
    rows.add("a", range(1, 11))
    batch = rows.step({"a": 4})
    assert batch.rope_lens.tolist() == [10, 10, 10, 10]


def test_build_needs_the_plans_rows_and_room(rows):
    rows.add("a", [1, 2])
    plan = rows.states.plan(SchedulerOutput(num_scheduled_tokens={"a": 2}))
    with pytest.raises(IntegrityError, match="sync comes before build"):
        rows.batch.build(plan, BatchDescriptor(num_tokens=2, num_reqs=1))
    rows.batch.sync(plan, rows.states)
    for num_tokens, num_reqs in ((1, 1), (33, 1), (2, 0), (2, 9)):
        with pytest.raises(IntegrityError, match="the buffers hold 8 and 32"):
            rows.batch.build(plan, BatchDescriptor(num_tokens=num_tokens, num_reqs=num_reqs))


def test_removing_a_request_without_a_row_is_harmless(rows):
    rows.batch.remove("nobody")
    assert rows.batch.row_moves == 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda rows: rows.batch.token_ids_cpu.__setitem__((0, 1), 99), "tokens are not those"),
        (lambda rows: rows.tables.swap_row(0, 1), "blocks are not those"),
        (lambda rows: rows.states.remove("b"), "which is gone"),
        (lambda rows: rows.batch.token_ids_cpu.__setitem__((5, 0), 1), "beyond the last"),
        (lambda rows: rows.batch._rows.update(a=1, b=0), "not the rows' order"),
        (lambda rows: rows.tables.add(5, [[1], [2]]), "blocks of no request"),
    ],
)
def test_integrity_notices(rows, damage, message):
    rows.add("a", [1, 2, 3])
    rows.add("b", [50, 51, 52])
    rows.step({"a": 3, "b": 3})
    damage(rows)
    with pytest.raises(IntegrityError, match=message):
        rows.batch.check_integrity(rows.states)


@pytest.fixture(params=["v1", "v2"])
def builder(request):
    if request.param == "v1":
        return Rows().batch
    return AscendInputBatcher(SHAPE, CONTEXT, AscendRequestState(SHAPE, CONTEXT))


def test_a_dummy_batch_shares_its_tokens_out(builder):
    batch = builder.dummy(11, 3, BatchDescriptor(num_tokens=16, num_reqs=4))
    assert batch.is_dummy
    assert batch.query_start_loc.tolist() == [0, 3, 7, 11, 11]
    assert batch.seq_lens.tolist() == [3, 4, 4, 0]
    assert batch.host_seq_lens.upper_bound.tolist() == batch.host_seq_lens.exact().tolist() == [3, 4, 4]
    assert batch.logits_indices.tolist() == [2, 6, 10]
    assert not batch.input_ids.any()
    assert batch.input_ids.shape == (16,)
    assert batch.idx_mapping.tolist() == [0, 1, 2]
    assert batch.positions[:11].tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize(("num_tokens", "num_reqs"), [(2, 3), (4, 0), (16, 9)])
def test_an_impossible_dummy_is_refused(builder, num_tokens, num_reqs):
    with pytest.raises(UnsupportedError, match=f"{num_reqs} requests and {num_tokens} tokens"):
        builder.dummy(num_tokens, num_reqs, BatchDescriptor(num_tokens=num_tokens, num_reqs=num_reqs))


def test_a_dummy_batch_touches_no_request(rows):
    rows.add("a", [1, 2, 3, 4])
    rows.step({"a": 2})
    before = rows.snapshot()
    rows.batch.dummy(8, 8, BatchDescriptor(num_tokens=8, num_reqs=8))
    assert rows.snapshot() == before
    rows.batch.check_integrity(rows.states)


def test_buffers_keep_their_addresses(builder):
    small, large = (builder.dummy(n, 1, BatchDescriptor(num_tokens=n, num_reqs=1)) for n in (1, 32))
    for name in ("input_ids", "positions", "rope_lens", "token_rows", "seq_lens", "query_start_loc"):
        assert getattr(small, name).data_ptr() == getattr(large, name).data_ptr(), name
