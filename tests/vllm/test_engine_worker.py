"""Methods of the worker through vLLM's `collective_rpc`, those of plugins included; traces; what shutdown leaves."""

import json

import pytest
import vllm_engine
import vllm_plugin
from vllm_engine import ask, completions, generate, said_by_us, said_by_vllm

from workerkit.framework import roles
from workerkit.framework.errors import IntegrityError, UnsupportedError

ASKS = [ask(prompt, max_tokens=6) for prompt in vllm_engine.prompts([20, 3])]
FOREIGN = "vllm_plugin.Foreign"


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory):
    with vllm_plugin.installed(tmp_path_factory.mktemp("site")):
        yield


@pytest.fixture(autouse=True)
def unmixed():
    """vLLM mixes --worker-extension-cls into the class itself, where it would stay for the next worker."""
    yield
    from workerkit.plugins.vllm.worker import VllmWorker

    VllmWorker.__bases__ = VllmWorker.__bases__[:1]


def started(tiny_dir, runner="v2", extensions=(), **options):
    workerkit = vllm_engine.config(runner, components={"worker_extensions": list(extensions)})
    return vllm_engine.vllm_engine(tiny_dir, workerkit, **options)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_b176_methods_of_our_plugins_and_of_vllms_extension_are_both_there(tiny_dir, runner):
    with vllm_engine.our_engine(tiny_dir) as ours:
        expected = said_by_us(completions(ours, ASKS))
    with started(tiny_dir, runner, ["tools"], worker_extension_cls=FOREIGN) as llm:
        (count,) = llm.collective_rpc("num_weights")
        assert count > 49152 * 64
        assert llm.collective_rpc("num_weights", args=(2,)) == [2 * count]
        assert llm.collective_rpc("num_weights", kwargs={"factor": 3}) == [3 * count]
        assert llm.collective_rpc("rank_and", args=("more",)) == [(0, "more")]
        assert llm.collective_rpc("check_integrity") == [None]
        assert llm.collective_rpc("check_health") == [None]
        assert llm.collective_rpc(lambda worker, x: (worker.rank, x), args=(5,)) == [(0, 5)]
        with pytest.raises(LookupError, match="as told"):
            llm.collective_rpc("fail")
        for name in ("num_weight", "_step_", "workerkit"):
            with pytest.raises((NotImplementedError, AttributeError), match=name):
                llm.collective_rpc(name)
        assert said_by_vllm(generate(llm, ASKS)) == expected


@pytest.mark.parametrize(
    ("extensions", "options", "names"),
    [
        (["tools"], {"worker_extension_cls": "vllm_plugin.ForeignTools"}, "offers num_weights, "),
        (["tools", "hides"], {}, "offers get_model, "),
    ],
)
def test_b176_a_name_that_two_offer_is_refused_at_start(tiny_dir, extensions, options, names):
    with pytest.raises(UnsupportedError, match=names), started(tiny_dir, "v2", extensions, **options):
        raise AssertionError("it started")
    assert not vllm_engine.our_threads()


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_check_integrity_tells(tiny_dir, runner):
    """It is the worker's own check, and what it finds reaches who asked; here a slot that was taken behind its back."""
    with started(tiny_dir, runner) as llm:
        states = vllm_engine.worker_of(llm)._assembly.get(roles.REQUEST_STATE)
        lost = states._slots._free.pop()
        with pytest.raises(IntegrityError):
            llm.collective_rpc("check_integrity")
        states._slots._free.append(lost)
        assert llm.collective_rpc("check_integrity") == [None]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_profile_is_written_where_vllm_is_told(tiny_dir, tmp_path, runner):
    profiler = {"profiler": "torch", "torch_profiler_dir": str(tmp_path)}
    with started(tiny_dir, runner, profiler_config=profiler) as llm:
        for count in (1, 2):
            llm.start_profile()
            generate(llm, ASKS)
            llm.stop_profile()
            traces = sorted(tmp_path.iterdir())
            assert len(traces) == count
            assert json.loads(traces[-1].read_text())["traceEvents"]
        with pytest.raises(UnsupportedError, match="no prefix"):
            llm.start_profile("mine")
        generate(llm, ASKS)


def test_an_engine_can_be_shut_down_twice_and_another_started(tiny_dir):
    for _ in range(2):
        with started(tiny_dir, "v2") as llm:
            generate(llm, ASKS)
            llm.llm_engine.engine_core.shutdown()
        assert not vllm_engine.our_threads()


def test_a_shutdown_with_requests_under_way_leaves_nothing(tiny_dir):
    with started(tiny_dir, "v2") as llm:
        for row, one in enumerate(ASKS):
            llm.llm_engine.add_request(str(row), {"prompt_token_ids": [*one.prompt]}, one.vllm_params())
        llm.llm_engine.step()
    assert not vllm_engine.our_threads()
