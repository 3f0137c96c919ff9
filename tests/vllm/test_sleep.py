"""Sleep and wake-up through vLLM: memory is given back, tokens afterwards are those of before."""

import pytest
import vllm_engine
from vllm_engine import ask, completions, generate, said_by_us, said_by_vllm

from workerkit.framework.interfaces.kv_cache import KVCaches
from workerkit.framework.interfaces.model import LoadedModel

pytestmark = pytest.mark.timeout(120)  # an engine that stays asleep waits for ever
SELF_DRAFT = {"speculator": "draft_model", "draft": "target", "rejection": "standard"}
CONFIGS = {  # (variant, components, drafts a step)
    "v1": ("v1", {}, 0),
    "v2": ("v2", {}, 0),
    "v1-itself": ("v1", SELF_DRAFT, 3),
    "v2-itself": ("v2", SELF_DRAFT, 3),
}


@pytest.fixture(scope="module")
def asks():
    lengths = [5, 16, 40, 30, 1, 22, 70, 18]
    sampled = {"temperature": 0.8, "top_k": 30}
    return [
        ask(prompt, max_tokens=12 + row, **({**sampled, "seed": row} if row % 2 else {}))
        for row, prompt in enumerate(vllm_engine.prompts(lengths))
    ]


@pytest.fixture(scope="module")
def expected(tiny_dir, asks):
    with vllm_engine.our_engine(tiny_dir) as ours:
        return said_by_us(completions(ours, asks))


@pytest.fixture(
    scope="module",
    params=["v1", "v2-itself", *(pytest.param(name, marks=pytest.mark.newest) for name in ("v2", "v1-itself"))],
)
def llm(request, tiny_dir):
    variant, components, count = CONFIGS[request.param]
    runner, asynchronous = vllm_engine.VARIANTS[variant]
    workerkit = vllm_engine.config(runner, components=components, limits={"num_speculative_tokens": count})
    with vllm_engine.vllm_engine(tiny_dir, workerkit, asynchronous, enable_sleep_mode=True) as llm:
        yield llm


def cache_bytes(llm):
    storages = vllm_engine.worker_of(llm)._assembly.value(KVCaches).storages
    return sum(tensor.untyped_storage().nbytes() for tensor in storages)


def weight_bytes(llm):
    network = vllm_engine.worker_of(llm)._assembly.value(LoadedModel).network
    return sum(tensor.untyped_storage().nbytes() for _, tensor in network.weights())


@pytest.mark.parametrize("tags", [[None], [["weights"], ["kv_cache"]], [["kv_cache"], ["weights"]]])
@pytest.mark.parametrize("level", [1, 2])
def test_tokens_after_are_those_of_before(llm, asks, expected, level, tags):
    assert said_by_vllm(generate(llm, asks)) == expected
    before = (cache_bytes(llm), weight_bytes(llm))
    llm.sleep(level=level)
    assert llm.llm_engine.is_sleeping()
    assert cache_bytes(llm) == 0
    assert (weight_bytes(llm) == before[1]) == (level == 1)
    llm.collective_rpc("check_integrity")
    for some in tags:
        llm.wake_up(tags=some)
    assert not llm.llm_engine.is_sleeping()
    assert (cache_bytes(llm), weight_bytes(llm)) == before
    outputs = generate(llm, asks)
    assert said_by_vllm(outputs) == expected
    assert not any(output.num_cached_tokens for output in outputs)
    llm.collective_rpc("check_integrity")


def add(engine, asks):
    for row, one in enumerate(asks):
        engine.add_request(str(row), {"prompt_token_ids": [*one.prompt]}, one.vllm_params())


def finish(engine, done, steps=10**6):
    """Step until all have ended; `done` collects them by row."""
    while engine.has_unfinished_requests() and steps:
        done |= {int(output.request_id): output for output in engine.step() if output.finished}
        steps -= 1


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("steps", [1, 3, 9])
def test_requests_that_are_kept_go_on(llm, asks, expected, level, steps):
    """They sleep waiting, in the middle of their prompt or of their output, and with a step in flight."""
    add(llm.llm_engine, asks)
    done = {}
    finish(llm.llm_engine, done, steps)
    llm.sleep(level=level, mode="keep")
    assert (cache_bytes(llm) == 0) == (level > 0)
    llm.wake_up(tags=["scheduling"] if level == 0 else None)
    finish(llm.llm_engine, done)
    assert said_by_vllm(done[row] for row in range(len(asks))) == expected
    llm.collective_rpc("check_integrity")


def test_requests_that_are_not_kept_are_aborted(llm, asks, expected):
    add(llm.llm_engine, asks)
    for _ in range(3):
        llm.llm_engine.step()
    llm.sleep(level=1)  # mode "abort"
    assert vllm_engine.num_requests(llm) == 0
    llm.llm_engine.abort_request([str(row) for row in range(len(asks))])  # vLLM's front end has not heard of it here
    llm.wake_up()
    assert said_by_vllm(generate(llm, asks)) == expected


def test_requests_go_on_when_their_cache_is_reset(llm, asks, expected):
    """What a change of weights in training asks for: running requests are preempted and come back in the same step."""
    add(llm.llm_engine, asks)
    done = {}
    for steps in (1, 2, 3, 5, 5):
        finish(llm.llm_engine, done, steps)
        assert llm.reset_prefix_cache(reset_running_requests=True)
    finish(llm.llm_engine, done)
    assert said_by_vllm(done[row] for row in range(len(asks))) == expected
    llm.collective_rpc("check_integrity")


def test_the_cache_alone_is_given_back(llm, asks, expected):
    generate(llm, asks)
    core = llm.llm_engine.engine_core.engine_core
    while core.scheduler.has_requests() or core.batch_queue:  # finished ones that the worker has not heard of
        llm.llm_engine.step()
    before = cache_bytes(llm)
    llm.sleep(level=0, mode="keep")
    llm.release_kv_cache_memory()
    assert cache_bytes(llm) == 0 < before
    llm.wake_up(tags=["kv_cache"])
    assert cache_bytes(llm) == before
    outputs = generate(llm, asks)
    assert said_by_vllm(outputs) == expected
    assert not any(output.num_cached_tokens for output in outputs)
