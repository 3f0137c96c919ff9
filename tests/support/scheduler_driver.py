"""The engine's loop in small, around a scheduler and the fake worker of the engine tests."""

from collections import Counter, deque

from workerkit.components.engine.scheduler import ContinuousScheduler, SchedulerConfig
from workerkit.framework.interfaces.engine import CacheIdentity, EngineRequest
from workerkit.framework.interfaces.sampling_params import SamplingParams

NO_STOP = frozenset()
PLAIN = CacheIdentity()


class Driver:
    """Remembers what each incarnation of a request yielded, and checks everything after every call."""

    def __init__(self, fakes, shape=None, layout=None, **config):
        self.shape = shape or fakes.shape()
        self.layout = layout or fakes.layout()
        self.scheduler = ContinuousScheduler(SchedulerConfig(**config), self.shape, self.layout)
        self.worker = fakes.Worker(self.shape, self.layout)
        self.reference = fakes.reference
        self.in_flight = deque()
        self.live = {}  # req_id -> (prompt, params, stop_ids, tokens so far)
        self.done = {}  # req_id -> (tokens, reason)
        self.cached = {}  # req_id -> prompt tokens that it did not have to compute when it was first admitted
        self.count = Counter()

    def add(self, req_id, prompt, stop_ids=NO_STOP, priority=0, identity=PLAIN, **params):
        params = SamplingParams(**{"seed": 0, **params})
        self.scheduler.add(
            EngineRequest(
                req_id=req_id,
                prompt_token_ids=tuple(prompt),
                params=params,
                stop_ids=stop_ids,
                priority=priority,
                cache_identity=identity,
            )
        )
        self.worker.identities[req_id] = identity
        self.live[req_id] = (tuple(prompt), params, stop_ids, [])
        self.cached.pop(req_id, None)

    def abort(self, req_id):
        self.live.pop(req_id, None)
        return self.scheduler.abort(req_id)

    def start(self):
        output = self.scheduler.schedule()
        self.count["preempted"] += len(output.preempted_req_ids)
        self.count["copies"] += len(output.block_copies)
        for new in output.new_requests:
            if new.req_id not in self.cached:
                self.cached[new.req_id] = new.num_computed_tokens
                self.count["cached tokens"] += new.num_computed_tokens
            elif new.num_computed_tokens:
                self.count["resumed hits"] += 1
        self.worker.execute_model(output)
        if output.num_scheduled_tokens:
            self.in_flight.append((output, self.worker.sample_tokens()))
        self.check()
        return output

    def collect(self):
        output, step = self.in_flight.popleft()
        self.count["steps"] += 1
        for req_id, progress in self.scheduler.update(output, step.get()).items():
            prompt, params, stop_ids, so_far = self.live[req_id]
            so_far.extend(progress.token_ids)
            reason = progress.finish_reason
            assert progress.num_cached_tokens == self.cached[req_id]
            if reason is not None:
                assert (tuple(so_far), reason) == self.reference(prompt, params, stop_ids, self.shape)
                del self.live[req_id]
                self.done[req_id] = tuple(so_far), reason
                self.count[reason] += 1
        self.check()

    def step(self):
        output = self.start()
        if self.in_flight:
            self.collect()
        return output

    def check(self):
        self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        assert stats["num_running"] + stats["num_waiting"] == len(self.live)
        assert stats["num_cached_tokens"] == self.count["cached tokens"]

    def forget(self):
        """The cache loses what it held for later, and the memory really loses it."""
        self.scheduler.reset_prefix_cache()
        held = {block for r in self.worker.requests.values() for have in r.blocks for block in have}
        self.worker.cache = {slot: v for slot, v in self.worker.cache.items() if slot[1] in held}
        self.check()

    def run(self, limit=5000):
        for _ in range(limit):
            if not (self.scheduler.has_work or self.in_flight):
                break
            while self.scheduler.has_work and len(self.in_flight) < self.scheduler.max_in_flight:
                if not self.start().num_scheduled_tokens:
                    break
            if self.in_flight:
                self.collect()
        self.check_empty()

    def check_empty(self):
        assert not self.scheduler.has_work
        assert not self.live
        assert not self.worker.requests
        assert self.scheduler.stats() == {
            "num_running": 0,
            "num_waiting": 0,
            "num_free_blocks": self.layout.num_blocks - 1,
            "num_preemptions": self.count["preempted"],
            "num_cached_tokens": self.count["cached tokens"],
            "num_drafts": self.worker.num_drafts,
            "num_draft_tokens": self.worker.num_draft_tokens,
            "num_accepted_tokens": self.worker.num_drafts_accepted,
        }
        held = [v for v in vars(self.scheduler).values() if isinstance(v, dict | list | set | deque)]
        assert len(held) == 6
        assert not any(held), "a per-request container was not drained"
