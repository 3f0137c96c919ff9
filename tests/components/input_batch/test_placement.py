"""What the buffers keep from step to step is never out of date: a used builder builds what a fresh one does."""

import attrs
import numpy as np
import pytest
import torch

from workerkit.components.input_batch.ascend import AscendInputBatcher
from workerkit.components.request_state.ascend import AscendRequestState
from workerkit.framework.interfaces.batch import BatchPlan
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.graph import BatchDescriptor
from workerkit.framework.interfaces.runner import WorkerShape

SHAPE = WorkerShape(
    max_model_len=32, max_num_reqs=4, max_num_batched_tokens=24, vocab_size=100, num_speculative_tokens=2
)
CONTEXT = DeviceContext(device=torch.device("cpu"), dtype=torch.float32)
BY_TOKEN = ("input_ids", "positions", "rope_lens", "token_rows", "logits_indices", "logits_rows", "draft_ids")
BY_ROW = ("idx_mapping", "query_start_loc", "seq_lens")


def contents(batch):
    host = (batch.query_start_loc_np, batch.cu_num_logits_np, batch.host_seq_lens.exact())
    sizes = (batch.num_reqs, batch.num_reqs_padded, batch.num_tokens, batch.num_tokens_padded, batch.max_query_len)
    return (
        [getattr(batch, name).tolist() for name in (*BY_TOKEN, *BY_ROW)] + [array.tolist() for array in host] + [sizes]
    )


def next_plan(rng, last):
    """Mostly the last step again, or with one column changed: what must be noticed."""
    if last is not None and rng.random() < 0.7:
        change = rng.choice(["nothing", "nothing", "nothing", "slots", "prompt_lens", "num_draft_tokens"])
        changed = {
            "slots": rng.permutation(4)[: last.num_reqs],
            "prompt_lens": last.prompt_lens + 8,
            # as many tokens, but of a prefill, or the other way round
            "num_draft_tokens": np.where(last.num_draft_tokens, 0, np.minimum(last.num_scheduled_tokens - 1, 2)),
        }
        more = {change: changed[change]} if change in changed else {}
        return attrs.evolve(last, num_computed_tokens=last.num_computed_tokens + 1, **more)
    num_reqs = int(rng.integers(1, 4))
    drafts = rng.integers(0, 3, num_reqs) if rng.random() < 0.3 else np.zeros(num_reqs, np.int64)
    counts = drafts + 1 if rng.random() < 0.8 else rng.integers(3, 6, num_reqs)
    return BatchPlan(
        req_ids=tuple(f"r{row}" for row in range(num_reqs)),
        slots=rng.permutation(4)[:num_reqs] if rng.random() < 0.3 else np.arange(num_reqs),
        num_scheduled_tokens=counts.astype(np.int32),
        num_computed_tokens=rng.integers(0, 9, num_reqs).astype(np.int32),
        num_draft_tokens=drafts.astype(np.int32),
        prefill_lens=np.full(num_reqs, 4, np.int32),
        prompt_lens=np.full(num_reqs, 4 if rng.random() < 0.7 else 20, np.int32),
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_used_builder_builds_what_a_fresh_one_does(seed):
    rng = np.random.default_rng(seed)
    states = AscendRequestState(SHAPE, CONTEXT)
    used, plan, reused, last = AscendInputBatcher(SHAPE, CONTEXT, states), None, 0, None
    for _ in range(150):
        states.device.all_token_ids[:] = torch.from_numpy(rng.integers(0, 100, (4, 32)))
        states.device.num_computed_tokens[:] = torch.from_numpy(rng.integers(0, 9, 4))
        states.device.draft_tokens[:] = torch.from_numpy(rng.integers(-1, 100, (4, 2)))
        fresh = AscendInputBatcher(SHAPE, CONTEXT, states)
        pad = int(rng.random() < 0.3)
        if rng.random() < 0.2:
            num_reqs = int(rng.integers(1, 4))
            desc = BatchDescriptor(num_tokens=num_reqs + 2 * pad, num_reqs=num_reqs + pad)
            batches = [builder.dummy(num_reqs, num_reqs, desc) for builder in (used, fresh)]
        else:
            plan = next_plan(rng, plan)
            desc = BatchDescriptor(num_tokens=plan.num_tokens + 2 * pad, num_reqs=plan.num_reqs + pad)
            batches = [builder.build(plan, desc) for builder in (used, fresh)]
        assert contents(batches[0]) == contents(batches[1])
        reused += batches[0].token_rows is last
        last = batches[0].token_rows
    assert reused >= 10, "the case that this is about has to occur"
