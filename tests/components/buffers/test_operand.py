"""What is written for numpy views on a CPU means the same for tensors, as on any other device."""

import pytest
import torch

import workerkit.components.block_table.ascend as tables_module
import workerkit.components.block_table.group as group_module
import workerkit.components.input_batch.ascend as batch_module
import workerkit.components.input_batch.layout as layout_module
import workerkit.components.request_state.ascend as states_module
from workerkit.components.buffers.upload import operand
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.graph import BatchDescriptor
from workerkit.framework.interfaces.kv_cache import KVCacheGroup, KVCacheSpec, KVLayout
from workerkit.framework.interfaces.request import NewRequest, SchedulerOutput
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling import SamplerOutput
from workerkit.framework.interfaces.sampling_params import SamplingParams

CONTEXT = DeviceContext(device=torch.device("cpu"), dtype=torch.float32)
SHAPE = WorkerShape(
    max_model_len=16, max_num_reqs=4, max_num_batched_tokens=16, vocab_size=50, num_speculative_tokens=2
)
LAYOUT = KVLayout(
    num_blocks=9,
    groups=(
        KVCacheGroup(
            spec=KVCacheSpec(num_kv_heads=1, head_dim=4, dtype="float32", block_size=8, element_bytes=4), layers=(0,)
        ),
    ),
    kernel_block_size=4,
)


def test_a_view_shares_memory():
    tensor = torch.zeros(3, dtype=torch.int32)
    operand(tensor)[1] = 7
    assert tensor.tolist() == [0, 7, 0]


def two_steps():
    """A prefill and a verify step of two requests; every integer that came out of them."""
    states = states_module.AscendRequestState(SHAPE, CONTEXT)
    builder = batch_module.AscendInputBatcher(SHAPE, CONTEXT, states)
    tables = tables_module.AscendBlockTables(SHAPE, CONTEXT, LAYOUT)
    for name, length in (("a", 5), ("b", 3)):
        tokens = tuple(range(1, length + 1))
        request = NewRequest(
            req_id=name, token_ids=tokens, prompt_len=length - 1, sampling=SamplingParams(), block_ids=((length,),)
        )
        slot = states.add(request)
        states.write(slot, request)
        tables.add(slot, request.block_ids)
    tables.apply(tables.stage())
    result = []
    for scheduled, drafts, num_sampled in (({"b": 3, "a": 4}, {}, [1, 0]), ({"b": 3, "a": 1}, {"b": 2}, [2, 1])):
        if drafts:
            states._num_computed_np[:2] = [4, 3]
        plan = states.plan(SchedulerOutput(num_scheduled_tokens=scheduled, scheduled_drafts=drafts))
        batch = builder.build(plan, BatchDescriptor(num_tokens=10, num_reqs=3))
        gathered = tables.gather(batch)
        shown = (batch.input_ids, batch.positions, batch.rope_lens, batch.token_rows, batch.seq_lens)
        shown += (batch.query_start_loc, batch.logits_indices, *gathered.block_tables, *gathered.slot_mappings)
        result += [tensor.tolist() for tensor in shown]
        sampled = SamplerOutput(
            token_ids=torch.tensor([[21, 22, -7], [31, -7, -7]]),
            num_sampled=torch.tensor(num_sampled, dtype=torch.int32),
            num_rejected=torch.tensor([1 if drafts else 0, 0], dtype=torch.int32),
        )
        states.commit(batch, sampled)
        states.store_drafts(batch, torch.tensor([[8, -1], [9, 9]]))
        device = states.device
        shown = (device.all_token_ids, device.total_len, device.num_computed_tokens, device.last_sampled)
        result += [tensor.tolist() for tensor in shown]
    return result


def test_tensors_and_views_agree(monkeypatch: pytest.MonkeyPatch):
    on_views = two_steps()
    for module in (tables_module, group_module, batch_module, layout_module, states_module):
        monkeypatch.setattr(module, "operand", lambda tensor: tensor)
    assert two_steps() == on_views
