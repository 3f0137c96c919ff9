"""The three block tables against one another and against the plain formula."""

import random

import attrs
import numpy as np
import pytest
import torch

from workerkit.components.block_table.ascend import AscendBlockTables
from workerkit.components.block_table.multi_group import MultiGroupBlockTable
from workerkit.components.block_table.reference import ReferenceBlockTables
from workerkit.components.input_batch.layout import AscendInputBuffers, dummy_plan
from workerkit.framework.errors import CacheError, IntegrityError
from workerkit.framework.interfaces.batch import BatchPlan
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.graph import BatchDescriptor
from workerkit.framework.interfaces.kv_cache import KVCacheGroup, KVCacheSpec, KVLayout, SlotBlockTables
from workerkit.framework.interfaces.runner import WorkerShape

CONTEXT = DeviceContext(device=torch.device("cpu"), dtype=torch.float32)
SHAPE = WorkerShape(max_model_len=64, max_num_reqs=4, max_num_batched_tokens=64, vocab_size=10)
KINDS = [MultiGroupBlockTable, AscendBlockTables, ReferenceBlockTables]


def layout_of(block_sizes=(8,), kernel=4, num_blocks=100):
    groups = tuple(
        KVCacheGroup(
            spec=KVCacheSpec(num_kv_heads=1, head_dim=4, dtype="float32", block_size=size, element_bytes=4), layers=(i,)
        )
        for i, size in enumerate(block_sizes)
    )
    return KVLayout(num_blocks=num_blocks, groups=groups, kernel_block_size=kernel)


def batch_of(rows, shape=SHAPE, num_reqs=None, num_tokens=None):
    """rows: (slot, computed, scheduled) each."""
    slots, computed, scheduled = (np.array(column) for column in zip(*rows, strict=True))
    plan = BatchPlan(
        req_ids=tuple(f"r{row}" for row in range(len(rows))),
        slots=slots,
        num_scheduled_tokens=scheduled.astype(np.int32),
        num_computed_tokens=computed.astype(np.int32),
        num_draft_tokens=np.zeros(len(rows), np.int32),
        prefill_lens=(computed + scheduled).astype(np.int32),
        prompt_lens=(computed + scheduled).astype(np.int32),
    )
    desc = BatchDescriptor(num_tokens=num_tokens or plan.num_tokens, num_reqs=num_reqs or plan.num_reqs)
    buffers = AscendInputBuffers(shape, CONTEXT.device)
    return buffers.fill_from_host(plan, desc, np.broadcast_to(0, (plan.num_reqs, shape.max_model_len)))


def dummy_batch(num_tokens, num_reqs):
    plan = dummy_plan(num_tokens, num_reqs, SHAPE)
    desc = BatchDescriptor(num_tokens=num_tokens, num_reqs=num_reqs)
    buffers = AscendInputBuffers(SHAPE, CONTEXT.device)
    return buffers.fill_from_host(plan, desc, np.broadcast_to(0, (num_reqs, num_tokens)), is_dummy=True)


def sync(tables):
    if isinstance(tables, SlotBlockTables):
        tables.apply(tables.stage())


def gather(tables, batch):
    sync(tables)
    return tables.gather(batch)


@pytest.fixture(params=KINDS)
def make(request):
    return lambda layout=None, shape=SHAPE: request.param(shape, CONTEXT, layout or layout_of())


def test_b120_kernel_blocks_smaller_than_manager_blocks(make):
    tables = make()
    tables.add(0, [[3, 1]])
    assert tables.block_ids(0) == ((6, 7, 2, 3),)
    result = gather(tables, batch_of([(0, 0, 10)]))
    (table,), (slots,) = result.block_tables, result.slot_mappings
    assert table[0].tolist() == [6, 7, 2, 3] + [0] * 12
    assert table.dtype == slots.dtype == torch.int32
    assert slots[[0, 5, 9]].tolist() == [24, 29, 9]
    assert slots.tolist() == [*range(24, 32), 8, 9]


def test_b157_blocks_of_two_groups_lie_within_pages_of_one_size(make):
    """A page holds 6 kernel blocks of the first group, of which a block takes 4, and 3 of the second, all of them."""
    layout = layout_of((16, 12), 4)
    strides = (6, 3)
    groups = [attrs.evolve(group, stride=stride) for group, stride in zip(layout.groups, strides, strict=True)]
    tables = make(attrs.evolve(layout, groups=tuple(groups)))
    tables.add(0, [[3, 1], [2, 4]])
    tables.append(0, [[7], []])
    assert tables.block_ids(0) == ((18, 19, 20, 21, 6, 7, 8, 9, 42, 43, 44, 45), (6, 7, 8, 12, 13, 14))
    slots = [mapping.tolist() for mapping in gather(tables, batch_of([(0, 0, 20)])).slot_mappings]
    assert slots == [[*range(72, 88), *range(24, 28)], [*range(24, 36), *range(48, 56)]]
    # Block 3 of the first group and block 4 of the second would overlap if kernel blocks followed one another.
    assert max(slots[0][:16]) // (4 * 6) == 3
    tables.check_integrity([0])


def test_the_null_block_stands_for_what_is_behind_a_window(make):
    layout = layout_of((8, 8), 4)
    full, windowed = layout.groups
    windowed = attrs.evolve(windowed, spec=attrs.evolve(windowed.spec, sliding_window=8), stride=3)
    tables = make(attrs.evolve(layout, groups=(full, windowed)))
    tables.add(0, [[3, 1, 2], [0, 0, 5]])
    assert tables.block_ids(0) == ((6, 7, 2, 3, 4, 5), (0, 0, 0, 0, 15, 16))
    result = gather(tables, batch_of([(0, 18, 2)]))
    assert [mapping.tolist() for mapping in result.slot_mappings] == [[18, 19], [62, 63]]
    tables.check_integrity([0])
    with pytest.raises(CacheError, match=r"\[0\] for row 0 of group 0: right is 1 to 99"):
        tables.append(0, [[0], [0]])
    with pytest.raises(CacheError, match=r"\[-1, 100\] for row 0 of group 1: right is 0 to 99"):
        tables.append(0, [[4], [-1, 100]])


def test_b34_a_reused_row_keeps_nothing_and_refuses_positions_past_its_blocks(make):
    tables = make()
    tables.add(0, [list(range(1, 9))])
    gather(tables, batch_of([(0, 0, 64)]))
    tables.clear(0)
    tables.add(0, [[9]])
    assert tables.block_ids(0) == ((18, 19),)
    result = gather(tables, batch_of([(0, 0, 8)]))
    assert result.block_tables[0].tolist() == [[18, 19] + [0] * 14]
    with pytest.raises(CacheError, match=r"'r0' is scheduled up to token 9, but its blocks of group 0 hold 8"):
        gather(tables, batch_of([(0, 8, 1)]))


def test_b34_overwriting_without_clearing(make):
    tables = make()
    tables.add(0, [[5, 6, 7]])
    tables.add(0, [[9]])
    assert tables.block_ids(0) == ((18, 19),)
    assert gather(tables, batch_of([(0, 0, 1)])).block_tables[0].tolist() == [[18, 19] + [0] * 14]


def test_b33_padding_is_never_written(make):
    tables = make()
    tables.add(0, [[3]])
    tables.add(1, [[4]])
    gather(tables, batch_of([(0, 0, 8), (1, 0, 8)]))  # leaves slots in the buffers
    tables.clear(1)
    result = gather(tables, batch_of([(0, 7, 1)], num_reqs=4, num_tokens=16))
    assert result.slot_mappings[0].tolist() == [31] + [-1] * 15
    assert result.block_tables[0].tolist() == [[6, 7] + [0] * 14] + [[0] * 16] * 3


def test_b55_positions_past_max_model_len_get_the_padding_slot(make):
    """The table's last entry is not used for them, nor is slot 0."""
    shape = attrs.evolve(SHAPE, max_model_len=16)
    tables = make(layout_of((16,), 16), shape)
    tables.add(0, [[2]])
    batch = batch_of([(0, 13, 3)], shape)
    batch.positions.copy_(torch.tensor([15, 16, 17]))
    assert gather(tables, batch).slot_mappings[0].tolist() == [47, -1, -1]
    batch.positions.copy_(torch.tensor([15, 40, 1000]))
    assert gather(tables, batch).slot_mappings[0].tolist() == [47, -1, -1]


def test_positions_past_the_blocks_are_mapped_nowhere(make):
    """Where the host cannot see it (a proposer that runs ahead), the device refuses on its own."""
    tables = make()
    tables.add(0, [[2]])
    batch = batch_of([(0, 6, 2)])
    batch.positions.copy_(torch.tensor([7, 8]))
    assert gather(tables, batch).slot_mappings[0].tolist() == [23, -1]


def test_capacity_is_refused_by_numbers_and_changes_nothing(make):
    tables = make(layout_of((8, 16), 4))
    tables.add(1, [[1, 2, 3, 4, 5, 6], [7, 8]])
    before = tables.block_ids(1)
    with pytest.raises(
        CacheError, match=r"row 1 of group 1 holds 2 blocks and cannot take 3 more: its capacity is 4 blocks of 16"
    ):
        tables.append(1, [[11], [12, 13, 14]])
    with pytest.raises(CacheError, match="row 1 of group 0 holds 0 blocks and cannot take 9"):
        tables.add(1, [list(range(1, 10)), [20]])
    assert tables.block_ids(1) == before
    tables.append(1, [[11, 12], []])
    assert tables.block_ids(1)[0][-4:] == (22, 23, 24, 25)


@pytest.mark.parametrize("wrong", [0, -1, 100])
def test_ids_outside_the_pool_are_refused(make, wrong):
    tables = make()
    with pytest.raises(CacheError, match=rf"block ids \[{wrong}\] for row 2 of group 0: right is 1 to 99"):
        tables.add(2, [[5, wrong]])
    assert tables.block_ids(2) == ((),)


def test_the_number_of_groups_must_fit(make):
    tables = make(layout_of((8, 8), 4))
    with pytest.raises(CacheError, match="1 groups, the cache has 2"):
        tables.add(0, [[1]])
    tables.add(0, [[1], [2]])
    tables.append(0, ())
    assert tables.block_ids(0) == ((2, 3), (4, 5))


def test_a_dummy_batch_sees_no_blocks_and_disturbs_none(make):
    tables = make()
    tables.add(0, [[3]])
    gather(tables, batch_of([(0, 0, 8)]))
    result = gather(tables, dummy_batch(7, 3))
    assert not result.block_tables[0].any()
    assert result.block_tables[0].shape == (3, 16)
    assert result.slot_mappings[0].tolist() == [-1] * 7
    assert gather(tables, batch_of([(0, 0, 1)])).block_tables[0][0, :2].tolist() == [6, 7]


def test_integrity_names_entries_of_no_request(make):
    tables = make()
    tables.add(0, [[3]])
    tables.add(2, [[4]])
    sync(tables)
    tables.check_integrity([0, 2])
    with pytest.raises(IntegrityError, match=r"\[2\] hold blocks of no request"):
        tables.check_integrity([0])


def test_integrity_notices_a_stale_tail():
    rows = MultiGroupBlockTable(SHAPE, CONTEXT, layout_of())
    rows.tables[0].np[1, 3] = 5
    slots = AscendBlockTables(SHAPE, CONTEXT, layout_of())
    slots._tables[0][1, 3] = 5
    for tables in (rows, slots):
        with pytest.raises(IntegrityError, match="not as many as it counts"):
            tables.check_integrity([0, 1])


def test_b111_rows_are_exchanged_not_copied():
    tables = MultiGroupBlockTable(SHAPE, CONTEXT, layout_of((8, 16), 4))
    tables.add(0, [[1, 2], [3]])
    tables.add(1, [[4], [5, 6]])
    first, second = tables.block_ids(0), tables.block_ids(1)
    tables.swap_row(0, 1)
    assert (tables.block_ids(0), tables.block_ids(1)) == (second, first)
    tables.move_row(1, 3)
    assert (tables.block_ids(3), tables.block_ids(1)) == (first, ((), ()))
    tables.check_integrity([0, 3])


@pytest.mark.parametrize("kind", [AscendBlockTables, ReferenceBlockTables])
def test_staged_writes_are_applied_later_and_in_order(kind):
    """What is staged for the next step does not show in this one, though the host has gone on."""
    tables = kind(SHAPE, CONTEXT, layout_of())
    tables.add(0, [[3, 4]])
    first = tables.stage()
    tables.clear(0)
    tables.add(0, [[5]])
    tables.append(0, [[6]])
    tables.clear(0)
    tables.add(0, [[7]])
    second = tables.stage()
    tables.apply(first)
    assert tables.gather(batch_of([(0, 0, 16)])).slot_mappings[0].tolist() == [*range(24, 40)]
    tables.apply(second)
    result = tables.gather(batch_of([(0, 0, 8)]))
    assert result.block_tables[0].tolist() == [[14, 15] + [0] * 14]
    assert tables.block_ids(0) == ((14, 15),)
    assert not any(tables.stage().groups)


def test_the_input_tables_keep_their_addresses():
    """Graphs replay on them."""
    for kind in (MultiGroupBlockTable, AscendBlockTables):
        tables = kind(SHAPE, CONTEXT, layout_of())
        tables.add(0, [[3]])
        first, second = (gather(tables, batch_of([(0, 0, n)])) for n in (1, 8))
        assert first.block_tables[0].data_ptr() == second.block_tables[0].data_ptr()
        assert first.slot_mappings[0].data_ptr() == second.slot_mappings[0].data_ptr()


@pytest.mark.parametrize(("block_sizes", "kernel"), [((4,), 4), ((8, 16), 4), ((12, 4, 8), 2)])
@pytest.mark.parametrize("seed", range(3))
def test_all_tables_agree_on_a_random_history(block_sizes, kernel, seed):
    random_ = random.Random(seed)
    shape = attrs.evolve(SHAPE, max_num_reqs=6, max_model_len=50)
    layout = layout_of(block_sizes, kernel, num_blocks=1000)
    tables = [kind(shape, CONTEXT, layout) for kind in KINDS]
    model = {}  # entry -> manager ids by group
    seen = {"add": 0, "append": 0, "clear": 0, "tokens": 0}

    def ids(counts):
        return [random_.sample(range(1, 1000), count) for count in counts]

    for _ in range(150):
        for _ in range(random_.randint(1, 4)):
            index = random_.randrange(6)
            room = [
                -(-50 // size) - len(held) for size, held in zip(block_sizes, model.get(index, [()] * 3), strict=False)
            ]
            action = random_.choice(["add", "append", "clear"])
            if action == "add":
                model[index] = ids([random_.randint(0, -(-50 // size)) for size in block_sizes])
                arguments = (index, model[index])
            elif action == "append" and index in model:
                more = ids([random_.randint(0, space) for space in room])
                model[index] = [old + extra for old, extra in zip(model[index], more, strict=True)]
                arguments = (index, more)
            else:
                action, arguments = "clear", (index,)
                model.pop(index, None)
            for table in tables:
                getattr(table, action)(*arguments)
            seen[action] += 1
        # rows 0.. of V1 are the slots of the others, so the batch takes a prefix, without holes
        rows = []
        for index in range(6):
            covered = min((len(h) * s for h, s in zip(model.get(index, []), block_sizes, strict=False)), default=0)
            covered, budget = min(covered, 50), 64 - sum(row[2] for row in rows)
            if not covered or not budget:
                break
            computed = random_.randrange(covered)
            rows.append((index, computed, random_.randint(1, min(covered - computed, budget))))
        if not rows:
            continue
        used = sum(row[2] for row in rows)
        batch = batch_of(rows, shape, random_.randint(len(rows), 6), random_.randint(used, 64))
        results = [gather(table, batch) for table in tables]
        seen["tokens"] += used
        for group, size in enumerate(block_sizes):
            expected = [
                model[index][group][position // size] * size + position % size
                for index, computed, scheduled in rows
                for position in range(computed, computed + scheduled)
            ]
            expected += [-1] * (batch.num_tokens_padded - used)
            for result in results:
                assert result.slot_mappings[group].tolist() == expected
                assert torch.equal(result.block_tables[group], results[-1].block_tables[group])
        for table in tables:
            table.check_integrity([index for index, held in model.items() if any(held)])
    assert seen["append"] > 30
    assert seen["clear"] > 30
    assert seen["tokens"] > 500
