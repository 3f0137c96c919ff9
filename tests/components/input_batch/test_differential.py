"""V1 and V2 build the same batch, block tables and slots from the same random history, and a plain model agrees.

The history has chunked prefills, aborts, preemptions that return with more tokens, drafts that are partly rejected,
steps that leave requests out, and, for V2, counts that lag one step behind what the device knows.
"""

import random
from collections import Counter

import attrs
import pytest
import torch

from workerkit.components.block_table.ascend import AscendBlockTables
from workerkit.components.block_table.multi_group import MultiGroupBlockTable
from workerkit.components.block_table.reference import ReferenceBlockTables
from workerkit.components.input_batch.ascend import AscendInputBatcher
from workerkit.components.input_batch.persistent import NPUInputBatch
from workerkit.components.request_state.ascend import AscendRequestState
from workerkit.components.request_state.host import HostStates
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.graph import BatchDescriptor
from workerkit.framework.interfaces.kv_cache import KVCacheGroup, KVCacheSpec, KVLayout
from workerkit.framework.interfaces.request import CachedRequest, NewRequest, SchedulerOutput
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling import SamplerOutput
from workerkit.framework.interfaces.sampling_params import SamplingParams

CONTEXT = DeviceContext(device=torch.device("cpu"), dtype=torch.float32)
VOCAB, K = 1000, 3


@attrs.define
class Request:
    """The truth about one request."""

    tokens: list
    prompt_len: int
    computed: int = 0
    lag: int = 0  # drafts of the last step that turned out rejected: the host's upper bound still counts them
    prefill_len: int = 0
    drafts: list = attrs.field(factory=list)  # as proposed, -1 included
    blocks: list = attrs.field(factory=list)
    admitted: bool = False


class World:
    """A scheduler that decides at random, and both runners' parts behind it."""

    def __init__(self, seed, block_sizes, kernel):
        self.random = random.Random(seed)
        self.shape = WorkerShape(
            max_model_len=40, max_num_reqs=6, max_num_batched_tokens=24, vocab_size=VOCAB, num_speculative_tokens=K
        )
        self.block_sizes = block_sizes
        groups = tuple(
            KVCacheGroup(
                spec=KVCacheSpec(num_kv_heads=1, head_dim=4, dtype="float32", block_size=size, element_bytes=4),
                layers=(index,),
            )
            for index, size in enumerate(block_sizes)
        )
        layout = KVLayout(num_blocks=400, groups=groups, kernel_block_size=kernel)
        self.free = list(range(1, 400))
        self.host = HostStates(self.shape)
        self.row_tables = MultiGroupBlockTable(self.shape, CONTEXT, layout)
        self.rows = NPUInputBatch(self.shape, CONTEXT, self.row_tables, layout)
        self.device = AscendRequestState(self.shape, CONTEXT)
        self.slot_tables = [kind(self.shape, CONTEXT, layout) for kind in (AscendBlockTables, ReferenceBlockTables)]
        self.batcher = AscendInputBatcher(self.shape, CONTEXT, self.device)
        self.requests = {}
        self.made = 0
        self.counts = Counter()

    def grow(self, request, num_tokens):
        """New blocks for each group, so that `num_tokens` fit."""
        new = []
        for held, size in zip(request.blocks, self.block_sizes, strict=True):
            self.random.shuffle(self.free)
            new.append([self.free.pop() for _ in range(-(-num_tokens // size) - len(held))])
            held.extend(new[-1])
        return tuple(map(tuple, new))

    def leave(self, req_id):
        request = self.requests[req_id]
        self.rows.remove(req_id)
        self.host.remove(req_id)
        slot = self.device.remove(req_id)
        for tables in self.slot_tables:
            tables.clear(slot)
        self.free += [block for held in request.blocks for block in held]
        request.admitted = False

    def schedule(self):
        """(new, cached for V1, cached for V2, scheduled, drafts); updates the truth's blocks."""
        new, exact, bound, scheduled, drafts = [], [], [], {}, {}
        names = list(self.requests)
        self.random.shuffle(names)
        for req_id in names:
            request, budget = self.requests[req_id], 24 - sum(scheduled.values())
            running = sum(other.admitted for other in self.requests.values())
            if budget < 1 or self.random.random() < 0.15 or not (request.admitted or running < 6):
                continue
            if not request.admitted:
                request.admitted, request.computed, request.lag, request.drafts = True, 0, 0, []
                request.prefill_len = len(request.tokens)
                request.blocks = [[] for _ in self.block_sizes]
                count = self.random.randint(1, min(budget, request.prefill_len))
                self.grow(request, count if self.random.random() < 0.5 else request.prefill_len)
                new.append(
                    NewRequest(
                        req_id=req_id,
                        token_ids=tuple(request.tokens),
                        prompt_len=request.prompt_len,
                        sampling=SamplingParams(),
                        block_ids=tuple(map(tuple, request.blocks)),
                    )
                )
            else:
                if request.computed < request.prefill_len:
                    count = self.random.randint(1, min(budget, request.prefill_len - request.computed))
                else:
                    most = min(K, budget - 1, 40 - request.computed - request.lag - 1)
                    drafts[req_id] = self.random.randint(0, most)
                    count = 1 + drafts[req_id]
                upper = request.computed + request.lag
                blocks = self.grow(request, upper + count)
                blocks = blocks if any(blocks) else ()
                exact.append(CachedRequest(req_id=req_id, num_computed_tokens=request.computed, new_block_ids=blocks))
                bound.append(CachedRequest(req_id=req_id, num_computed_tokens=upper, new_block_ids=blocks))
            scheduled[req_id] = count
        return new, exact, bound, scheduled, {req_id: count for req_id, count in drafts.items() if count}

    def churn(self):
        """Requests arrive, are aborted, are preempted."""
        while len(self.requests) < 8 and self.random.random() < 0.5:
            length = self.random.randint(1, 25)
            tokens = [self.random.randrange(VOCAB) for _ in range(length)]
            self.requests[f"r{self.made}"] = Request(tokens=tokens, prompt_len=length)
            self.made += 1
        for req_id, request in list(self.requests.items()):
            full = request.admitted and max(request.computed + request.lag, len(request.tokens)) >= 40
            if full or self.random.random() < 0.04:
                if request.admitted:
                    self.leave(req_id)
                del self.requests[req_id]
                self.counts["aborts"] += not full
            elif request.admitted and self.random.random() < 0.05:
                self.leave(req_id)
                self.counts["preemptions"] += 1

    def step(self):
        self.churn()
        new, exact, bound, scheduled, drafts = self.schedule()
        for request in new:
            self.host.add(request)
            slot = self.device.add(request)
            self.device.write(slot, request)
            for tables in self.slot_tables:
                tables.add(slot, request.block_ids)
        for cached in exact:
            self.host.update(cached)
        for cached in bound:
            self.device.update(cached)
            for tables in self.slot_tables:
                tables.append(self.device.slot(cached.req_id), cached.new_block_ids)
        if not scheduled:
            return
        output = SchedulerOutput(num_scheduled_tokens=scheduled, scheduled_drafts=drafts)
        host_plan, device_plan = self.host.plan(output), self.device.plan(output)
        assert host_plan.req_ids == device_plan.req_ids
        desc = BatchDescriptor(
            num_tokens=self.random.randint(host_plan.num_tokens, 24),
            num_reqs=self.random.randint(host_plan.num_reqs, 6),
        )
        self.rows.sync(host_plan, self.host)
        batches = [self.rows.build(host_plan, desc), self.batcher.build(device_plan, desc)]
        for batch in batches:
            self.check_batch(batch, drafts)
        self.check_tables(batches)
        self.sample(batches, drafts)
        self.counts["steps"] += 1
        self.counts["drafts"] += sum(drafts.values())
        self.counts["chunks"] += int(host_plan.is_partial.sum())

    def check_batch(self, batch, drafts):
        ids, positions, rope, rows, starts, lens, logits, logits_rows = [], [], [], [], [0], [], [], []
        for row, req_id in enumerate(batch.req_ids):
            request, count = self.requests[req_id], int(batch.plan.num_scheduled_tokens[row])
            # A draft of -1 still has to be some token.
            known = request.tokens + [max(token, 0) for token in (request.drafts + [0] * K)[: drafts.get(req_id, 0)]]
            at = range(request.computed, request.computed + count)
            ids += [known[position] for position in at]
            positions += at
            rope += [max(request.prompt_len, position + 1) for position in at]
            rows += [row] * count
            starts.append(starts[-1] + count)
            lens.append(request.computed + count)
            logits += range(starts[-1] - drafts.get(req_id, 0) - 1, starts[-1])
            logits_rows += [row] * (drafts.get(req_id, 0) + 1)
        token_pad = [0] * (batch.num_tokens_padded - len(ids))
        row_pad = batch.num_reqs_padded - len(lens)
        assert batch.input_ids.tolist() == ids + token_pad
        assert batch.positions.tolist() == positions + token_pad
        assert batch.rope_lens.tolist() == rope + token_pad
        assert batch.token_rows.tolist() == rows + token_pad
        assert batch.query_start_loc.tolist() == batch.query_start_loc_np.tolist() == starts + [starts[-1]] * row_pad
        assert batch.seq_lens.tolist() == lens + [0] * row_pad
        assert batch.host_seq_lens.exact().tolist() == lens
        assert (batch.host_seq_lens.upper_bound >= lens).all()
        assert batch.logits_indices.tolist() == logits
        assert batch.logits_rows.tolist() == logits_rows
        types = (batch.input_ids.dtype, batch.positions.dtype, batch.seq_lens.dtype, batch.idx_mapping.dtype)
        assert types == (torch.int32, torch.int64, torch.int32, torch.int64)

    def check_tables(self, batches):
        rows, slots = batches
        results = [self.row_tables.gather(rows)]
        for tables in self.slot_tables:
            tables.apply(tables.stage())
            results.append(tables.gather(slots))
        for group, size in enumerate(self.block_sizes):
            right = [
                self.requests[rows.req_ids[row]].blocks[group][position // size] * size + position % size
                for row, position in zip(rows.token_rows.tolist(), rows.positions.tolist(), strict=True)
            ][: rows.num_tokens]
            right += [-1] * (rows.num_tokens_padded - rows.num_tokens)
            for result in results:
                assert result.slot_mappings[group].tolist() == right
                assert torch.equal(result.block_tables[group], results[0].block_tables[group])

    def sample(self, batches, drafts):
        """Accept some drafts, draw a token, propose new drafts."""
        rows, slots = batches
        tokens, proposals = [], []
        for row, req_id in enumerate(rows.req_ids):
            request, partial = self.requests[req_id], bool(rows.plan.is_partial[row])
            count = drafts.get(req_id, 0)
            accepted = self.random.randint(0, count)
            kept = [max(token, 0) for token in (request.drafts + [0] * K)[:accepted]]
            drawn = [] if partial else [*kept, self.random.randrange(VOCAB)]
            request.lag = 0 if partial else count - accepted
            request.computed += int(rows.plan.num_scheduled_tokens[row]) - request.lag
            request.tokens += drawn
            proposed = self.random.randint(0, K)
            request.drafts = [self.random.randrange(VOCAB) for _ in range(proposed)] + [-1] * (K - proposed)
            tokens.append(drawn)
            proposals.append(request.drafts)
        self.host.commit(rows.plan, tokens)
        self.host.store_drafts(rows.plan, proposals)
        rejected = [self.requests[req_id].lag for req_id in rows.req_ids]
        garbage = [row + [-5] * (K + 1 - len(row)) for row in tokens]
        self.device.commit(
            slots,
            SamplerOutput(
                token_ids=torch.tensor(garbage),
                num_sampled=torch.tensor([len(row) for row in tokens], dtype=torch.int32),
                num_rejected=torch.tensor(rejected, dtype=torch.int32),
            ),
        )
        self.device.store_drafts(slots, torch.tensor(proposals))

    def check_integrity(self):
        admitted = {req_id for req_id, request in self.requests.items() if request.admitted}
        assert set(self.host.req_ids) == set(self.device.req_ids) == admitted
        self.host.check_integrity()
        self.device.check_integrity()
        self.rows.check_integrity(self.host)
        for tables in self.slot_tables:
            tables.apply(tables.stage())
            tables.check_integrity([self.device.slot(req_id) for req_id in admitted])
        state = self.device.device
        for req_id in admitted:
            request, slot = self.requests[req_id], self.device.slot(req_id)
            known = request.tokens[:40]
            assert state.all_token_ids[slot].tolist() == known + [0] * (40 - len(known))
            assert int(state.num_computed_tokens[slot]) == request.computed
            assert int(state.total_len[slot]) == len(request.tokens)
            assert int(state.last_sampled[slot]) == request.tokens[-1]
            assert self.host.get(req_id).token_ids == request.tokens


@pytest.mark.parametrize(("block_sizes", "kernel"), [((8,), 8), ((8, 8), 4), ((12, 4, 8), 2)])
@pytest.mark.parametrize("seed", range(2))
def test_v1_v2_and_the_model_agree(block_sizes, kernel, seed):
    world = World(seed, block_sizes, kernel)
    for _ in range(250):
        world.step()
        world.check_integrity()
    for req_id, request in world.requests.items():
        if request.admitted:
            world.leave(req_id)
    world.requests.clear()
    world.check_integrity()
    assert len(world.free) == 399
    counts = world.counts
    assert counts["steps"] > 200
    assert counts["preemptions"] > 20
    assert counts["aborts"] > 20
    assert counts["drafts"] > 100
    assert counts["chunks"] > 50
    assert world.rows.row_moves > 100
