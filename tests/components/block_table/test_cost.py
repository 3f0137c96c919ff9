"""What changes in the block tables costs what changes: no row is walked, and no block that a request held before."""

import attrs
import numpy as np
import pytest
import torch
from opcodes import count_opcodes

from workerkit.components.block_table.ascend import AscendBlockTables
from workerkit.components.block_table.multi_group import MultiGroupBlockTable
from workerkit.components.input_batch.layout import AscendInputBuffers
from workerkit.framework.interfaces.batch import BatchPlan
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.graph import BatchDescriptor
from workerkit.framework.interfaces.kv_cache import KVCacheGroup, KVCacheSpec, KVLayout
from workerkit.framework.interfaces.runner import WorkerShape

CONTEXT = DeviceContext(device=torch.device("cpu"), dtype=torch.float32)
SHAPE = WorkerShape(max_model_len=32, max_num_reqs=8, max_num_batched_tokens=64, vocab_size=10)


def tables_of(kind, held, num_blocks):
    """Tables whose row 0 holds that many blocks of 4 tokens."""
    shape = attrs.evolve(SHAPE, max_model_len=4 * held + 32)
    spec = KVCacheSpec(num_kv_heads=1, head_dim=4, dtype="float32", block_size=4, element_bytes=4)
    layout = KVLayout(num_blocks=num_blocks, groups=(KVCacheGroup(spec=spec, layers=(0,)),), kernel_block_size=4)
    tables = kind(shape, CONTEXT, layout)
    tables.add(0, [list(range(1, held + 1))])
    if isinstance(tables, AscendBlockTables):
        tables.apply(tables.stage())
    return tables, shape


def append(tables, block):
    tables.append(0, [[block]])
    if not isinstance(tables, AscendBlockTables):
        return None
    writes = tables.stage()
    tables.apply(writes)
    return writes


@pytest.mark.parametrize("kind", [MultiGroupBlockTable, AscendBlockTables])
def test_a_block_more_costs_the_same_whatever_a_row_holds(kind):
    costs = []
    for held, num_blocks in ((4, 10), (2000, 100_000)):
        tables, _ = tables_of(kind, held, num_blocks)
        cost, writes = count_opcodes(lambda tables=tables, held=held: append(tables, held + 1))
        costs.append(cost)
        if writes is not None:  # what crosses to the device
            ((slot, column, contents),) = writes.groups[0]
            assert (slot, column, contents.tolist()) == (0, held, [held + 1])
        assert tables.block_ids(0)[0] == tuple(range(1, held + 2))
    assert costs[0] == costs[1]


@pytest.mark.parametrize("kind", [MultiGroupBlockTable, AscendBlockTables])
def test_a_step_walks_no_row(kind):
    costs = []
    for held, num_blocks in ((4, 10), (2000, 100_000)):
        tables, shape = tables_of(kind, held, num_blocks)
        length = np.array([4 * held], np.int32)
        plan = BatchPlan(
            req_ids=("r",),
            slots=np.array([0]),
            num_scheduled_tokens=np.array([1], np.int32),
            num_computed_tokens=length - 1,
            num_draft_tokens=np.zeros(1, np.int32),
            prefill_lens=length,
            prompt_lens=length,
        )
        buffers = AscendInputBuffers(shape, CONTEXT.device)
        tokens = np.broadcast_to(0, (1, shape.max_model_len))
        batch = buffers.fill_from_host(plan, BatchDescriptor(num_tokens=1, num_reqs=1), tokens)
        tables.gather(batch)
        cost, found = count_opcodes(lambda tables=tables, batch=batch: tables.gather(batch))
        costs.append(cost)
        assert found.block_tables[0][0, :held].tolist() == list(range(1, held + 1))
    assert costs[0] == costs[1]
