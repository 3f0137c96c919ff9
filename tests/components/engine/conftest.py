"""A deterministic worker: a token is a hash of everything before it, read back from a cache through the block tables.

Whatever a scheduler does wrong (a block shared, a position skipped, a token lost) trips an assert or changes tokens.
"""

import pytest

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


def make_layout(num_blocks=64, block_sizes=(4,)):
    specs = [
        KVCacheSpec(num_kv_heads=1, head_dim=8, dtype="float32", block_size=size, element_bytes=4)
        for size in block_sizes
    ]
    groups = tuple(KVCacheGroup(spec=spec, layers=(i,)) for i, spec in enumerate(specs))
    return KVLayout(num_blocks=num_blocks, groups=groups, kernel_block_size=1)


def make_shape(max_model_len=64, max_num_reqs=4, max_num_batched_tokens=16, vocab_size=50, num_speculative_tokens=0):
    return WorkerShape(
        max_model_len=max_model_len,
        max_num_reqs=max_num_reqs,
        max_num_batched_tokens=max_num_batched_tokens,
        vocab_size=vocab_size,
        num_speculative_tokens=num_speculative_tokens,
    )


class HeldRequest:
    def __init__(self, new):
        self.tokens = list(new.token_ids)
        self.prefill_len = new.prefill_len
        self.seed = new.sampling.seed
        self.blocks = [list(ids) for ids in new.block_ids]
        self.num_computed = 0


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
        self.cache = {}  # (group, block, offset) -> token
        self.uncollected = []
        self.pending = None
        self.outputs = []
        self.calls = []
        self.num_drafts_rejected = 0

    shape = property(lambda self: self._shape)
    layout = property(lambda self: self._layout)

    def start(self):
        self.calls.append("start")

    def shutdown(self):
        self.calls.append("shutdown")

    def check_integrity(self):
        held = [block for r in self.requests.values() for have in r.blocks for block in have]
        assert len(held) == len(set(held))

    def check_health(self):
        return Health()

    def _unused(self, *args, **kwargs):
        raise AssertionError("the engine has no business here")

    init_device = load_model = determine_available_memory = plan_kv_cache = initialize_kv_cache = _unused
    compile_or_warm_up_model = execute_dummy_batch = sleep = wake_up = profile = _unused

    def execute_model(self, output):
        assert self.pending is None, "sample_tokens must follow execute_model"
        self.outputs.append(output)
        if self.fault is not None:
            self.fault(output)
        assert not output.blocks_to_zero
        assert not output.block_copies
        assert not output.finished_req_ids & output.preempted_req_ids
        for req_id in output.finished_req_ids | output.preempted_req_ids:
            del self.requests[req_id]  # KeyError: the worker never knew it
        for new in output.new_requests:
            assert new.req_id not in self.requests
            assert new.num_computed_tokens == 0
            assert new.prompt_len <= new.prefill_len
            self._check_handed_out(new.block_ids)
            self.requests[new.req_id] = HeldRequest(new)
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
        rows = [r.req_id for r in (*output.new_requests, *output.cached_requests)]
        assert sorted(rows) == sorted(output.num_scheduled_tokens)
        assert output.total_num_scheduled_tokens <= self.shape.max_num_batched_tokens
        assert all(count > 0 for count in output.num_scheduled_tokens.values())
        if not rows:
            return ModelRunnerOutput()
        drafts = output.scheduled_drafts
        sampled = tuple(self._run(r, output.num_scheduled_tokens[r], drafts.get(r, 0)) for r in rows)
        blocks = {block for r in rows for have in self.requests[r].blocks for block in have}
        self.pending = ModelRunnerOutput(req_ids=tuple(rows), sampled_token_ids=sampled), blocks
        return None

    def _check_handed_out(self, block_ids):
        """New blocks are in the pool's range, and no step that the host has not collected may still write them."""
        for have in block_ids:
            for block in have:
                assert 1 <= block < self.layout.num_blocks
                assert all(block not in step.blocks for step in self.uncollected)

    def _slot(self, request, group, position):
        size = self.layout.block_sizes[group]
        return group, request.blocks[group][position // size], position % size

    def _write(self, request, position, token):
        assert position < self.shape.max_model_len
        for group in range(len(self.layout.groups)):
            self.cache[self._slot(request, group, position)] = token

    def _sample(self, request, length):
        """From the cache alone, and the same from each group."""
        prefixes = {
            tuple(self.cache[self._slot(request, group, position)] for position in range(length))
            for group in range(len(self.layout.groups))
        }
        (prefix,) = prefixes
        return next_token(prefix, request.seed, self.shape.vocab_size)

    def _run(self, req_id, count, num_drafts):
        request = self.requests[req_id]
        start, end = request.num_computed, request.num_computed + count - num_drafts
        assert end <= len(request.tokens)
        assert not num_drafts or end == len(request.tokens) > request.prefill_len
        for position in range(start, end):
            self._write(request, position, request.tokens[position])
        request.num_computed = end
        if end < len(request.tokens):
            return ()
        new = [self._sample(request, end)]
        accepted = hash(tuple(request.tokens)) % (num_drafts + 1)
        for position in range(end, end + accepted):
            self._write(request, position, new[-1])
            new.append(self._sample(request, position + 1))
        for position in range(end + accepted, end + num_drafts):
            self._write(request, position, -1)  # rejected
        self.num_drafts_rejected += num_drafts - accepted
        request.num_computed = end + accepted
        request.tokens += new
        return tuple(new)

    def sample_tokens(self, grammar=None):
        (result, blocks), self.pending = self.pending, None
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
