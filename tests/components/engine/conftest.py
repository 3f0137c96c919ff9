"""A deterministic worker: a token is a hash of everything before it, read back from a cache through the block tables.

The cache is a shadow of the real one: it records for every slot of every block from which exact prefix its key and
value were computed, and each scheduled token asserts that its whole context is there. Whatever a scheduler does wrong
(a block shared that may not be, a position skipped, a token lost, a shared block written) trips an assert or changes
tokens.

Columns behind a sliding window are never looked at: their blocks may belong to someone else. A recurrent state is the
prefix that it stands for; a request that goes on from a copy has to find its own there.

It speculates, too. After each step it proposes 0 to K drafts for each request, of which the first ones are right, and
writes rubbish to all positions that a draft network may write: K + 1 behind the step's.
"""

from collections import Counter
from types import MappingProxyType

import pytest

from workerkit.framework.interfaces.engine import CacheIdentity
from workerkit.framework.interfaces.kv_cache import KVCacheGroup, KVCacheSpec, KVLayout
from workerkit.framework.interfaces.request import ModelRunnerOutput, StepOutput
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.worker import Health, Worker


def next_token(prefix, seed, vocab_size):
    return hash((seed, *prefix)) % vocab_size


def reference(prompt, params, stop_ids, shape):
    """What the request yields when it is computed alone: (tokens, why it ended)."""
    tokens = list(prompt)
    limit = min(shape.max_model_len, len(prompt) + (params.max_tokens or shape.max_model_len))
    while True:
        token = next_token(tokens, params.seed, shape.vocab_size)
        if token in stop_ids:
            return tuple(tokens[len(prompt) :]), "stop"
        tokens.append(token)
        if len(tokens) == limit:
            return tuple(tokens[len(prompt) :]), "length"


def make_layout(num_blocks=64, block_sizes=(4,), windows=None, state_blocks=0, state_interval=0, dtypes=None):
    """`windows`, `dtypes`: one for each group."""
    specs = [
        KVCacheSpec(num_kv_heads=1, head_dim=8, dtype=dtype, block_size=size, element_bytes=4, sliding_window=window)
        for size, window, dtype in zip(
            block_sizes, windows or [None] * len(block_sizes), dtypes or ["float32"] * len(block_sizes), strict=True
        )
    ]
    groups = tuple(KVCacheGroup(spec=spec, layers=(i,)) for i, spec in enumerate(specs))
    return KVLayout(
        num_blocks=num_blocks,
        groups=groups,
        kernel_block_size=1,
        state_blocks=state_blocks,
        state_interval=state_interval,
    )


def make_shape(max_model_len=64, max_num_reqs=4, max_num_batched_tokens=16, vocab_size=50, num_speculative_tokens=0):
    return WorkerShape(
        max_model_len=max_model_len,
        max_num_reqs=max_num_reqs,
        max_num_batched_tokens=max_num_batched_tokens,
        vocab_size=vocab_size,
        num_speculative_tokens=num_speculative_tokens,
    )


class HeldRequest:
    def __init__(self, new, identity, layout):
        self.identity = identity
        self.layout = layout
        self.prefixes = []
        self.tokens = list(new.token_ids)
        self.prefill_len = new.prefill_len
        self.seed = new.sampling.seed
        self.blocks = [list(ids) for ids in new.block_ids]
        self.num_computed = new.num_computed_tokens
        self.drafts = ()

    def seen_from(self, group, position):
        """The first position that a query at this one sees."""
        window = self.layout.groups[group].spec.sliding_window
        return 0 if window is None else max(0, position - window + 1)

    def seen_blocks(self):
        """Those that it still needs."""
        return [
            block
            for group, (size, have) in enumerate(zip(self.layout.block_sizes, self.blocks, strict=True))
            for block in have[self.seen_from(group, self.num_computed) // size :]
        ]

    def prefix(self, position):
        """All that the key and value at a position depend on; the salt too, although they do not."""
        while len(self.prefixes) <= position:
            end = len(self.prefixes) + 1
            spans = tuple(
                (span.start + offset, span.digest, offset)
                for span in self.identity.multimodal
                for offset in range(min(span.length, end - span.start))
            )
            self.prefixes.append((self.identity.salt, self.identity.lora, tuple(self.tokens[:end]), spans))
        return self.prefixes[position]


class FakeStep(StepOutput):
    def __init__(self, worker, result, blocks):
        self.worker, self.result, self.blocks = worker, result, blocks

    def get(self):
        self.worker.uncollected.remove(self)
        return self.result


class PrefixWorker(Worker):
    """`fault(output)` is called before each step and may raise; `tamper(result)` may change a step's answer."""

    def __init__(self, shape, layout, fault=None, tamper=None):
        self._shape, self._layout = shape, layout
        self.fault, self.tamper = fault, tamper
        self.requests = {}
        self.cache = {}  # (group, block, offset) -> the prefix it was computed from
        self.copies = {}  # block -> which block of a copy of a state it is, and the prefix
        self.saves = ()
        self.num_saves = 0
        self.num_zeroed = 0
        self.most_held = 0
        self.identities = {}  # req_id -> CacheIdentity, where it is not the plain one
        self.num_copies = 0
        self.uncollected = []
        self.pending = None
        self.outputs = []
        self.calls = []
        self.num_drafts = 0  # how often a request verified some
        self.num_draft_tokens = 0
        self.num_drafts_accepted = 0
        self.num_placeholders = 0

    shape = property(lambda self: self._shape)
    layout = property(lambda self: self._layout)

    def start(self):
        self.calls.append("start")

    def shutdown(self):
        self.calls.append("shutdown")

    def check_integrity(self):
        for request in self.requests.values():
            held = request.seen_blocks()
            assert len(held) == len(set(held))
            assert 0 not in held

    adapters = MappingProxyType({"calm": "digest of calm", "loud": "digest of loud"})
    accepts_images = True

    def check_request(self, params):
        """Whatever it is: only the seed counts."""

    def check_health(self):
        return Health()

    def _unused(self, *args, **kwargs):
        raise AssertionError("the engine has no business here")

    init_device = load_model = determine_available_memory = plan_kv_cache = initialize_kv_cache = _unused
    compile_or_warm_up_model = execute_dummy_batch = sleep = wake_up = profile = _unused
    call = extension_methods = load_adapter = remove_adapter = _unused

    def execute_model(self, output):
        assert self.pending is None, "sample_tokens must follow execute_model"
        self.outputs.append(output)
        if self.fault is not None:
            self.fault(output)
        assert not output.finished_req_ids & output.preempted_req_ids
        for req_id in output.finished_req_ids | output.preempted_req_ids:
            del self.requests[req_id]  # KeyError: the worker never knew it
        holders = Counter(block for r in self.requests.values() for block in r.seen_blocks())
        self._check_zeroed(output)
        self._copy(output)
        for new in output.new_requests:
            assert new.req_id not in self.requests
            assert 0 <= new.num_computed_tokens < new.prefill_len
            assert new.prompt_len <= new.prefill_len
            copied = {target for _, target in output.block_copies}
            num_shared = [new.num_computed_tokens // size for size in self.layout.block_sizes]
            fresh = [ids[count:] for ids, count in zip(new.block_ids, num_shared, strict=True)]
            self._check_handed_out(fresh, copied)
            request = HeldRequest(new, self.identities.get(new.req_id, CacheIdentity()), self.layout)
            self.requests[new.req_id] = request
            if self.layout.state_blocks and new.num_computed_tokens:
                right = request.prefix(new.num_computed_tokens - 1)
                copy = [self.copies.get(block) for block in new.state_block_ids]
                assert copy == [(number, right) for number in range(self.layout.state_blocks)]
            else:
                assert new.state_block_ids == ()
        assert len(self.requests) <= self.shape.max_num_reqs
        for cached in output.cached_requests:
            request = self.requests[cached.req_id]
            if self.shape.num_speculative_tokens:
                assert cached.num_computed_tokens >= request.num_computed
            else:
                assert cached.num_computed_tokens == request.num_computed
            if cached.new_block_ids:
                assert any(cached.new_block_ids)
                self._check_handed_out(cached.new_block_ids)
                for have, more in zip(request.blocks, cached.new_block_ids, strict=True):
                    have.extend(more)
        self.check_integrity()
        self._check_drafts(output)
        rows = [r.req_id for r in (*output.new_requests, *output.cached_requests)]
        assert sorted(rows) == sorted(output.num_scheduled_tokens)
        assert output.total_num_scheduled_tokens <= self.shape.max_num_batched_tokens
        assert all(count > 0 for count in output.num_scheduled_tokens.values())
        if not rows:
            return ModelRunnerOutput()
        drafts = output.scheduled_drafts
        counts = output.num_scheduled_tokens
        for r in rows:  # all of a step is written before anyone attends to it
            self._write_known(self.requests[r], counts[r] - drafts.get(r, 0), holders)
        self._check_saves(output)
        self.pending = {r: (counts[r], drafts.get(r, 0)) for r in rows}
        return None

    def _check_zeroed(self, output):
        """Exactly the blocks that are new and that nothing fills whole, where what was in them could be no number."""
        layout = self.layout
        needed = layout.state_blocks or len({group.spec.dtype for group in layout.groups}) > 1
        fresh = {block for r in output.cached_requests for ids in r.new_block_ids for block in ids}
        for new in output.new_requests:
            num_shared = [new.num_computed_tokens // size for size in layout.block_sizes]
            for ids, count in zip(new.block_ids, num_shared, strict=True):
                fresh.update(ids[count:])
        fresh -= {target for _, target in output.block_copies}
        assert sorted(output.blocks_to_zero) == (sorted(fresh) if needed else [])
        self.num_zeroed += len(output.blocks_to_zero)

    def _check_saves(self, output):
        """Copies go where no request's blocks are, at multiples of the interval."""
        held = {block for r in self.requests.values() for block in r.seen_blocks()}
        taken = [block for save in output.state_saves for block in save.block_ids]
        assert len(taken) == len(set(taken)) == len(output.state_saves) * self.layout.state_blocks
        assert held.isdisjoint(taken)
        self._check_handed_out([taken])
        for save in output.state_saves:
            assert save.num_tokens > 0
            assert save.num_tokens % self.layout.state_interval == 0
            assert save.req_id in output.num_scheduled_tokens
        self.saves = output.state_saves
        self.most_held = max(self.most_held, len(held))

    def _save(self, start, rows):
        """`start`: tokens that each request had computed. Between verified tokens every state is there, else the last
        one is; where a copy is not of what was asked for, it is of nothing."""
        for save in self.saves:
            request, (count, num_drafts) = self.requests[save.req_id], rows[save.req_id]
            end, before = request.num_computed, start[save.req_id]
            is_there = before < save.num_tokens <= end if num_drafts else save.num_tokens == before + count
            state = request.prefix(save.num_tokens - 1) if is_there else "of other tokens"
            for number, block in enumerate(save.block_ids):
                self.copies[block] = number, state
            self.num_saves += is_there

    def _check_drafts(self, output):
        """Where the engine can know how many drafts there are, it schedules no more; for others up to K."""
        unknown = {req_id for step in self.uncollected for req_id in step.result.req_ids}
        for req_id, count in output.scheduled_drafts.items():
            most = self.shape.num_speculative_tokens if req_id in unknown else len(self.requests[req_id].drafts)
            assert 0 < count <= most

    def _copy(self, output):
        """All sources are read before any destination is written; each destination is a new block."""
        handed_out = {block for new in output.new_requests for ids in new.block_ids for block in ids}
        targets = [target for _, target in output.block_copies]
        assert len(targets) == len(set(targets))
        assert handed_out.issuperset(targets)
        sources = {source for source, _ in output.block_copies}
        read = {block: {k: v for k, v in self.cache.items() if k[1] == block} for block in sources}
        for source, target in output.block_copies:
            assert read[source]
            self._wipe(target)
            self.cache |= {(group, target, offset): v for (group, _, offset), v in read[source].items()}
        self.num_copies += len(output.block_copies)

    def _wipe(self, block):
        self.copies.pop(block, None)
        for group, size in enumerate(self.layout.block_sizes):
            for offset in range(size):
                self.cache.pop((group, block, offset), None)

    def _check_handed_out(self, block_ids, copied=()):
        """New blocks are in the pool's range, and no step that the host has not collected may still write them. What
        was in them before is of no use to anyone."""
        for have in block_ids:
            for block in have:
                assert 1 <= block < self.layout.num_blocks
                assert all(block not in step.blocks for step in self.uncollected)
                if block not in copied:
                    self._wipe(block)

    def _slot(self, request, group, position):
        size = self.layout.block_sizes[group]
        return group, request.blocks[group][position // size], position % size

    def _write(self, request, position, value):
        assert position < self.shape.max_model_len
        for group in range(len(self.layout.groups)):
            self.cache[self._slot(request, group, position)] = value

    def _write_known(self, request, count, holders):
        start, end = request.num_computed, request.num_computed + count
        assert end <= len(request.tokens)
        for position in range(start, end):
            for group in range(len(self.layout.groups)):
                block = self._slot(request, group, position)[1]
                assert holders[block] <= 1, f"block {block} is written, but another request has it"
            self._write(request, position, request.prefix(position))

    def _sample(self, request, length):
        """From the cache alone, and the same from each group."""
        for group in range(len(self.layout.groups)):
            for position in range(request.seen_from(group, length - 1), length):
                right = request.prefix(position)
                assert self.cache.get(self._slot(request, group, position)) == right
        prefix = self.cache[self._slot(request, 0, length - 1)][2]
        return next_token(prefix, request.seed, self.shape.vocab_size)

    def _run(self, req_id, count, num_drafts, grammar):
        request = self.requests[req_id]
        end = request.num_computed + count - num_drafts
        assert not num_drafts or end == len(request.tokens) > request.prefill_len
        request.num_computed = end
        token = self._sample(request, end)  # a partial prefill, too, attends to its whole context
        drafts, request.drafts = request.drafts[:num_drafts], ()
        if end < len(request.tokens):
            return ()
        new = [self.pick(req_id, token, 0, grammar)]
        for row, draft in enumerate(drafts, 1):
            if draft != new[-1]:
                break
            request.tokens.append(draft)
            self._write(request, end + row - 1, request.prefix(end + row - 1))
            new.append(self.pick(req_id, self._sample(request, end + row), row, grammar))
        accepted = len(new) - 1
        for position in range(end + accepted, end + num_drafts):
            self._write(request, position, "rejected")
        self.num_drafts += bool(drafts)
        self.num_draft_tokens += len(drafts)
        self.num_drafts_accepted += accepted
        self.num_placeholders += num_drafts - len(drafts)
        request.num_computed = end + accepted
        request.tokens.append(new[-1])
        request.drafts = self.propose(request)
        return tuple(new)

    def pick(self, req_id, token, row, grammar):
        """What becomes of the token that the request's logits row would yield."""
        return token

    def propose(self, request):
        """0 to K drafts, of which the first 0 to all are what will come."""
        chance = hash((self.shape.num_speculative_tokens, *request.tokens))
        count = chance % (self.shape.num_speculative_tokens + 1)
        num_right = chance // 64 % (count + 1)
        tokens = list(request.tokens)
        for number in range(count):
            token = next_token(tokens, request.seed, self.shape.vocab_size)
            tokens.append(token if number < num_right else (token + 1) % self.shape.vocab_size)
        return tuple(tokens[len(request.tokens) :])

    def _look_ahead(self, req_id, end):
        """A draft network may write K + 1 positions behind the step, which nobody else may have."""
        request = self.requests[req_id]
        holders = Counter(block for r in self.requests.values() for block in r.seen_blocks())
        for position in range(end, min(end + self.shape.num_speculative_tokens + 1, self.shape.max_model_len)):
            for group in range(len(self.layout.groups)):
                assert holders[self._slot(request, group, position)[1]] == 1
            self._write(request, position, "drafted")

    def report(self, sampled):
        """What else the answer holds."""
        return {}

    def sample_tokens(self, grammar=None):
        rows, self.pending = self.pending, None
        start = {r: self.requests[r].num_computed for r in rows}
        read = {block for r in rows for block in self.requests[r].seen_blocks()}
        ends = {r: self.requests[r].num_computed + count for r, (count, _) in rows.items()}
        sampled = {r: self._run(r, *counts, grammar) for r, counts in rows.items()}
        drafts = ()
        if self.shape.num_speculative_tokens:
            drafts = tuple(self.requests[r].drafts for r in rows)
            for r in rows:
                self._look_ahead(r, ends[r])
        result = ModelRunnerOutput(
            req_ids=tuple(rows),
            sampled_token_ids=tuple(sampled.values()),
            draft_token_ids=drafts,
            **self.report(sampled),
        )
        self._save(start, rows)
        blocks = read.union(*(save.block_ids for save in self.saves))
        step = FakeStep(self, self.tamper(result) if self.tamper else result, blocks)
        self.uncollected.append(step)
        return step


@pytest.fixture
def fakes():
    """The names of this file, for tests that cannot import a conftest."""

    class Fakes:
        Worker = PrefixWorker
        layout = staticmethod(make_layout)
        shape = staticmethod(make_shape)
        reference = staticmethod(reference)
        next_token = staticmethod(next_token)

    return Fakes
