"""A step's planning costs what the step schedules, not what the cache, the contexts or the queue hold."""

from opcodes import count_opcodes

from workerkit.components.engine.scheduler import ContinuousScheduler, SchedulerConfig
from workerkit.framework.interfaces.engine import CacheIdentity, EngineRequest
from workerkit.framework.interfaces.kv_cache import KVCacheGroup, KVCacheSpec, KVLayout
from workerkit.framework.interfaces.request import ModelRunnerOutput
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling_params import SamplingParams

BLOCK = 16


def scheduler_of(num_blocks, batch):
    spec = KVCacheSpec(num_kv_heads=1, head_dim=8, dtype="float32", block_size=BLOCK, element_bytes=4)
    layout = KVLayout(num_blocks=num_blocks, groups=(KVCacheGroup(spec=spec, layers=(0,)),), kernel_block_size=BLOCK)
    shape = WorkerShape(max_model_len=10_000, max_num_reqs=batch, max_num_batched_tokens=10**6, vocab_size=50)
    return ContinuousScheduler(SchedulerConfig(), shape, layout)


def request(name, length):
    tokens = tuple(hash((name, position)) % 50 for position in range(length))
    params = SamplingParams(temperature=0.0, max_tokens=100)
    return EngineRequest(
        req_id=str(name),
        prompt_token_ids=tokens,
        params=params,
        stop_ids=frozenset(),
        priority=0,
        cache_identity=CacheIdentity(),
    )


def step(scheduler):
    """One step whose answer is token 1 for everyone; (instructions, what it scheduled)."""
    planned, output = count_opcodes(scheduler.schedule)
    answer = ModelRunnerOutput(
        req_ids=tuple(output.num_scheduled_tokens), sampled_token_ids=((1,),) * len(output.num_scheduled_tokens)
    )
    taken, _ = count_opcodes(lambda: scheduler.update(output, answer))
    return planned + taken, output


def decode_cost(num_blocks=400, batch=4, context=96, waiting=0):
    """Instructions of a decode step without a new block, and of one in which every request gets one."""
    scheduler = scheduler_of(num_blocks, batch)
    for name in range(batch + waiting):
        scheduler.add(request(name, context))
    step(scheduler)
    growing, output = step(scheduler)  # the contexts fill their blocks
    assert all(len(cached.new_block_ids[0]) == 1 for cached in output.cached_requests)
    plain, output = step(scheduler)
    assert not any(cached.new_block_ids for cached in output.cached_requests)
    assert len(output.num_scheduled_tokens) == batch
    scheduler.check_integrity()
    return plain, growing


def test_a_step_costs_the_same_in_a_pool_of_a_hundred_thousand_blocks():
    assert decode_cost(num_blocks=100_000) == decode_cost()


def test_a_step_costs_the_same_at_long_contexts():
    assert decode_cost(num_blocks=3000, context=96 * 96) == decode_cost(num_blocks=3000)


def test_a_step_costs_the_same_with_many_in_the_queue():
    assert decode_cost(waiting=1000) == decode_cost(waiting=1)


def test_a_step_costs_as_much_again_for_each_request():
    costs = [decode_cost(num_blocks=4000, batch=batch) for batch in (8, 16, 32)]
    for few, some, many in zip(*costs, strict=True):
        assert many - some == 2 * (some - few)


def test_a_prompt_costs_its_own_blocks():
    """While others decode at long contexts; the digest of each block is computed once."""
    scheduler = scheduler_of(num_blocks=100_000, batch=4)
    for name in range(3):
        scheduler.add(request(name, 1600))
    step(scheduler)
    step(scheduler)  # all get a new block, and none in the steps that follow
    costs = []
    for name, length in ((3, 160), (4, 320), (5, 480)):
        scheduler.add(request(name, length))
        costs.append(step(scheduler)[0])
        scheduler.abort(str(name))
    assert costs[2] - costs[1] == costs[1] - costs[0]
    assert costs[1] < 2 * costs[0]
