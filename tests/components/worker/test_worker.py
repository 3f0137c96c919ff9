"""The life of a worker: stages in order, memory, sleep, health, profiler."""

import json

import pytest
import torch

from workerkit.components.worker.npu import parse_text_output
from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.errors import CacheError, ModelError, RequestError, StageError, UnsupportedError
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.request import CachedRequest, NewRequest, SchedulerOutput
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.testing.registry import fake_config, fake_registry

CONFIG = {
    "model": {"source": "random", "max_model_len": 64},
    "limits": {"max_num_reqs": 4, "max_num_batched_tokens": 32},
    "cache": {"block_size": 4, "num_blocks": 40},
    "components": {"loader": "random", "sampler": {"use": "torch", "temperature": 0.0}},
}
RUNNERS = pytest.mark.parametrize("runner", ["v1", "v2"])


def make(runner="v2", **overrides):
    return assemble(CONFIG, {"components.runner": runner, **overrides})


def tokens_of(worker, req_id="a", prompt=(5, 6, 7), count=6):
    """Greedy tokens of one request, which is then finished."""
    new = NewRequest(
        req_id=req_id,
        token_ids=prompt,
        prompt_len=len(prompt),
        sampling=SamplingParams(),
        block_ids=(tuple(range(1, 9)),),
    )
    outputs = [SchedulerOutput(new_requests=(new,), num_scheduled_tokens={req_id: len(prompt)})]
    for step in range(count - 1):
        cached = CachedRequest(req_id=req_id, num_computed_tokens=len(prompt) + step)
        outputs.append(SchedulerOutput(cached_requests=(cached,), num_scheduled_tokens={req_id: 1}))
    tokens = []
    for output in outputs:
        assert worker.execute_model(output) is None
        tokens += worker.sample_tokens().get().sampled_token_ids[0]
    worker.execute_model(SchedulerOutput(finished_req_ids=frozenset({req_id})))
    worker.check_integrity()
    return tokens


def test_a_backend_that_knows_no_scales_is_refused_before_weights_are_read():
    config = fake_config("v2", worker="npu")
    config["cache"]["quantization"] = {"layers": {"0": "int8"}}
    with assemble(config, registry=fake_registry()) as assembly:
        assembly.worker.init_device()
        with pytest.raises(
            UnsupportedError, match=r"components.attention: FakeAttention .* cache.quantization .* int8"
        ):
            assembly.worker.load_model()


@RUNNERS
def test_each_stage_is_refused_out_of_order(runner):
    with make(runner) as assembly:
        worker = assembly.worker
        for early in (worker.load_model, worker.determine_available_memory, worker.execute_dummy_batch, worker.sleep):
            with pytest.raises(StageError, match="ASSEMBLED"):
                early()
        worker.init_device()
        with pytest.raises(StageError, match="LOADED, the worker is in stage DEVICE"):
            worker.plan_kv_cache(2**20)
        worker.load_model()
        with pytest.raises(StageError):
            worker.load_model()
        worker.initialize_kv_cache(worker.plan_kv_cache(2**20))
        worker.compile_or_warm_up_model()
        with pytest.raises(StageError):
            worker.initialize_kv_cache(worker.layout)
        with pytest.raises(StageError, match="sample_tokens needs"):
            worker.sample_tokens()
    with pytest.raises(StageError, match="SHUT_DOWN"):
        worker.execute_dummy_batch()
    worker.shutdown()  # twice is fine


@RUNNERS
def test_execute_model_twice_without_sampling_is_refused(runner):
    with make(runner) as assembly:
        worker = assembly.worker
        worker.start()
        new = NewRequest(req_id="a", token_ids=(1, 2), prompt_len=2, sampling=SamplingParams(), block_ids=((1,),))
        output = SchedulerOutput(new_requests=(new,), num_scheduled_tokens={"a": 2})
        worker.execute_model(output)
        with pytest.raises(StageError, match="twice"):
            worker.execute_model(output)
        worker.sample_tokens().get()
        with pytest.raises(StageError):
            worker.sample_tokens()


def test_profiling_measures_a_real_step_and_leaves_nothing_behind():
    config = {**CONFIG, "cache": {"block_size": 4, "memory_fraction": 0.9}}
    with assemble(config, {"components.runner": "v2"}) as assembly:
        worker = assembly.worker
        worker.init_device()
        worker.load_model()
        available = worker.determine_available_memory()
        total = assembly.get(roles.DEVICE).memory().total_bytes
        assert 0 < available < 0.9 * total
        with pytest.raises(StageError):  # the trial published nothing
            _ = worker.layout
        layout = worker.plan_kv_cache(available)
        assert layout.num_blocks == 1 + 4 * 64 // 4  # what four requests of full length can use, not all the memory
        worker.initialize_kv_cache(layout)
        assert len(tokens_of(worker)) == 6


@pytest.mark.parametrize(("cache", "blocks"), [({"memory_bytes": 2**19}, None), ({"num_blocks": 33}, 33)])
def test_the_config_overrides_profiling(cache, blocks):
    with assemble({**CONFIG, "cache": {"block_size": 4, **cache}}) as assembly:
        worker = assembly.worker
        worker.init_device()
        worker.load_model()
        bytes_ = worker.determine_available_memory()
        assert bytes_ == cache.get("memory_bytes", 0)
        layout = worker.plan_kv_cache(bytes_)
        assert blocks is None or layout.num_blocks == blocks


def test_a_cache_too_small_for_one_request_says_what_to_change():
    config = {**CONFIG, "cache": {"block_size": 4, "num_blocks": 9}}
    with assemble(config) as assembly, pytest.raises(CacheError, match="max_model_len"):
        assembly.worker.start()


def test_a_context_longer_than_the_models_is_refused():
    with make(**{"model.max_model_len": 5000}) as assembly, pytest.raises(ModelError, match=r"5000.*1024"):
        assembly.worker.init_device()


@RUNNERS
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_waking_gives_the_same_tokens(runner, level):
    with make(runner) as assembly:
        worker = assembly.worker
        worker.start()
        before = tokens_of(worker)
        network = assembly.value(LoadedModel).network
        worker.sleep(level)
        sizes = {name: tensor.untyped_storage().nbytes() for name, tensor in network.weights()}
        assert all(size == 0 for size in sizes.values()) == (level == 2)
        with pytest.raises(StageError, match="ASLEEP"):
            worker.execute_dummy_batch()
        if level == 2:
            worker.wake_up(("weights",))
            with pytest.raises(StageError, match="ASLEEP"):  # the cache still sleeps
                worker.execute_dummy_batch()
        worker.wake_up()
        assert tokens_of(worker) == before
        worker.sleep(1)
        worker.wake_up()
        assert tokens_of(worker) == before


def test_sleep_is_refused_while_requests_live_and_for_unknown_levels_and_tags():
    with make() as assembly:
        worker = assembly.worker
        worker.start()
        with pytest.raises(UnsupportedError, match="level 3"):
            worker.sleep(3)
        new = NewRequest(req_id="a", token_ids=(1, 2), prompt_len=2, sampling=SamplingParams(), block_ids=((1,),))
        worker.execute_model(SchedulerOutput(new_requests=(new,), num_scheduled_tokens={"a": 2}))
        worker.sample_tokens().get()
        with pytest.raises(StageError, match="1 requests are live"):
            worker.sleep()
        worker.execute_model(SchedulerOutput(finished_req_ids=frozenset({"a"})))
        worker.sleep()
        with pytest.raises(UnsupportedError, match="weight"):
            worker.wake_up(("weight",))
        worker.wake_up()


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("NPU ID : 0\n\tHealth Status  : OK\n", None),
        ("Health : OK\nHealth : Warning", "Warning"),
        ("Health : Alarm", "Alarm"),
        ("Health : ", "reports health"),
        ("nothing to see", "no Health line"),
        ("", "no Health line"),
    ],
)
def test_parse_text_output(text, bad):
    if bad is None:
        parse_text_output(text)
    else:
        with pytest.raises(UnsupportedError, match=bad):
            parse_text_output(text)


def test_health_failures_surface_and_switched_off_observers_are_named():
    with make(**{"components.observers": ["metrics"]}) as assembly:
        worker = assembly.worker
        worker.start()
        assert worker.check_health().degraded == ()
        assembly.get_all(roles.OBSERVERS)[0]._steps = None  # its next call fails
        tokens_of(worker)
        assert "observers[0]" in worker.check_health().degraded[0]
        assembly.get(roles.DEVICE).health_text = lambda: "Health : Alarm"
        with pytest.raises(UnsupportedError, match="Alarm"):
            worker.check_health()


def test_the_profiler_writes_a_chrome_trace(tmp_path):
    with make(**{"components.worker.profile_dir": str(tmp_path)}) as assembly:
        worker = assembly.worker
        worker.start()
        with pytest.raises(StageError, match="not running"):
            worker.profile(is_start=False)
        for number in (1, 2):
            worker.profile()
            with pytest.raises(StageError, match="already"):
                worker.profile()
            tokens_of(worker)
            worker.profile(is_start=False)
            traces = sorted(tmp_path.glob("*.json"))
            assert len(traces) == number
            assert any(
                "aten::" in str(event.get("name")) for event in json.loads(traces[-1].read_text())["traceEvents"]
            )


@RUNNERS
def test_the_same_request_gives_the_same_tokens_after_a_dummy_batch(runner):
    with make(runner) as assembly:
        worker = assembly.worker
        worker.start()
        before = tokens_of(worker)
        worker.execute_dummy_batch()
        assert tokens_of(worker) == before


@RUNNERS
def test_bfloat16_runs(runner):
    with make(runner, **{"model.dtype": "bfloat16"}) as assembly:
        assembly.worker.start()
        assert all(t.dtype in (torch.bfloat16, torch.float32) for _, t in assembly.value(LoadedModel).network.weights())
        assert len(tokens_of(assembly.worker)) == 6


def test_the_cache_generation_grows_when_the_cache_loses_its_contents():
    with make() as assembly:
        worker = assembly.worker
        worker.start()
        assert worker.cache_generation == 0
        for generation in (1, 2):
            worker.sleep()
            assert worker.cache_generation == generation
            worker.wake_up()
            assert worker.cache_generation == generation


@RUNNERS
def test_an_engine_finds_nothing_in_a_cache_that_slept(runner):
    """The worker is sent to sleep behind the engine's back."""
    parts = {"worker": "npu", "engine": "standalone", "scheduler": "continuous", "speculator": "none"}
    with assemble(fake_config(runner, **parts), registry=fake_registry()) as assembly:
        engine, prompt = assembly.engine, list(range(13))
        engine.start()
        params = SamplingParams(max_tokens=2)
        cached = [engine.generate([prompt], params)[0].num_cached_tokens for _ in range(2)]
        assembly.worker.sleep()
        assembly.worker.wake_up()
        cached += [engine.generate([prompt], params)[0].num_cached_tokens for _ in range(2)]
        assert cached == [0, 12, 0, 12]


def test_a_request_that_the_sampler_cannot_serve_is_refused():
    with make() as assembly:
        worker = assembly.worker
        with pytest.raises(StageError, match="ASSEMBLED"):
            worker.check_request(SamplingParams())
        worker.start()
        worker.check_request(SamplingParams(logit_bias={0: 1.0}))
        with pytest.raises(RequestError):
            worker.check_request(SamplingParams(logit_bias={10**6: 1.0}))
