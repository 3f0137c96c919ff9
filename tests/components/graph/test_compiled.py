"""The CPU's graph: the same tokens as eager steps, bit for bit, and a reason where there can be none."""

import logging

import attrs
import pytest
import torch
from letters import VOCAB, Letters

from workerkit.components.graph.compiled import CompiledGraphs
from workerkit.framework import assembly, roles
from workerkit.framework.interfaces.graph import BatchDescriptor, BatchShape
from workerkit.framework.interfaces.model import ModelInputs
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.plugins import load_plugins
from workerkit.kernels.cpu.native.build import unavailable

needs_native = pytest.mark.skipif(unavailable() is not None, reason=f"no native kernels here: {unavailable()}")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [list(range(1, 4)), list(range(10, 41)), [7] * 17]


def assemble(config, overlay=None):
    registry = load_plugins().registry
    registry.add(roles.TOKENIZER, "letters", Letters)
    return assembly.assemble(config, overlay or {}, registry=registry)


def config(loader=None, **components):
    return {
        "model": {"source": "random", "max_model_len": 64},
        "limits": {"max_num_reqs": 4, "max_num_batched_tokens": 16},
        "cache": {"block_size": 4, "num_blocks": 60},
        "components": {
            "loader": {"use": "random", "num_hidden_layers": 3, "vocab_size": VOCAB, **(loader or {})},
            "tokenizer": "letters",
            **components,
        },
    }


def tokens(made):
    results = made.engine.generate(PROMPTS, GREEDY)
    return [result.token_ids for result in results]


@needs_native
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("loader", [{}, {"qk_norm": True, "qkv_bias": True}], ids=["plain", "norms"])
def test_the_same_tokens_as_eager_steps(runner, dtype, loader, caplog):
    written = {}
    for graph in ("none", "compiled"):
        parts = config(loader, runner=runner, graph=graph)
        with caplog.at_level(logging.WARNING), assemble(parts, {"model.dtype": dtype}) as made:
            made.engine.start()
            written[graph] = tokens(made)
            made.worker.check_integrity()
    assert written["none"] == written["compiled"]
    assert "eagerly" not in caplog.text


@needs_native
def test_one_request_at_a_time_has_steps_of_many_tokens_too():
    written = []
    for graph in ("none", "compiled"):
        with assemble(config(graph=graph), {"limits.max_num_reqs": 1}) as made:
            made.engine.start()
            written.append(tokens(made))
    assert written[0] == written[1]


@needs_native
def test_it_is_what_a_cpu_gets(caplog):
    with assemble(config()) as made:
        graph = made.get(roles.GRAPH)
        assert graph.dispatch(BatchShape(num_tokens=5, num_reqs=2)).mode == "eager", "nothing is captured yet"
        made.engine.start()
        expected = BatchDescriptor(mode="full", num_tokens=5, num_reqs=2)
        assert graph.dispatch(BatchShape(num_tokens=5, num_reqs=2)) == expected, "nothing is padded"


@needs_native
def test_a_worker_that_wakes_up_captures_again():
    with assemble(config()) as made:
        made.engine.start()
        before = tokens(made)
        made.worker.sleep(2)
        made.worker.wake_up()
        assert made.get(roles.GRAPH).dispatch(BatchShape(num_tokens=1, num_reqs=1)).mode == "full"
        assert tokens(made) == before


@needs_native
def test_inputs_that_moved_are_noticed():
    with assemble(config()) as made:
        made.engine.start()
        graph = made.get(roles.GRAPH)
        run, desc = graph.run, BatchDescriptor(mode="full", num_tokens=1, num_reqs=1)

        def moved(_, forward, inputs):
            return run(desc, forward, attrs.evolve(inputs, positions=inputs.positions.clone()))

        graph.run = moved
        (result,) = made.engine.generate([PROMPTS[0]], GREEDY)
    assert result.finish_reason == "error"
    assert "not where they were when the graph was captured" in result.error


@needs_native
def test_hidden_states_between_layers_are_recorded_too():
    points = ["embed", "layers.1"]
    seen = {"none": [], "compiled": []}
    for graph, rows in seen.items():
        observers = [{"use": "tap", "layers": points}]
        with assemble(config(graph=graph, observers=observers, scheduler={"async_scheduling": False})) as made:
            made.engine.start()
            made.get_all(roles.OBSERVERS)[0].subscribe(rows.append)
            tokens(made)
    assert len(seen["none"]) == len(seen["compiled"]) > 30
    for eager, compiled in zip(seen["none"], seen["compiled"], strict=True):
        assert set(compiled.states) == set(points)
        assert all(compiled.states[point].equal(eager.states[point]) for point in points)


@pytest.mark.parametrize("kernels", [["cpu", "reference"], ["reference"]])
def test_where_nothing_can_be_recorded_the_log_says_why(kernels, caplog):
    with caplog.at_level(logging.WARNING), assemble(config(graph="compiled", kernels=kernels)) as made:
        made.engine.start()
        compiled = tokens(made)
    assert "steps run eagerly" in caplog.text
    with assemble(config(graph="none", kernels=kernels)) as made:
        made.engine.start()
        assert tokens(made) == compiled


@needs_native
def test_a_backend_that_no_graph_can_hold_is_no_error(caplog):
    with caplog.at_level(logging.WARNING), assemble(config(attention="sdpa", graph="none")) as made:
        made.engine.start()
        expected = tokens(made)
    with assemble(config(attention="sdpa")) as made:
        made.engine.start()
        assert tokens(made) == expected
    assert "steps run eagerly: the attention backend works out part of a step on the host" in caplog.text


def test_recurrent_states_are_not_recorded(caplog):
    class Recordable:
        graph_support = "always"

    shape = WorkerShape(max_model_len=8, max_num_reqs=2, max_num_batched_tokens=4, vocab_size=VOCAB)
    graphs = CompiledGraphs(shape, None, Recordable())
    ids = torch.zeros(2, dtype=torch.int64)
    inputs = ModelInputs(input_ids=ids, positions=ids, rope_lens=ids, attend=None, recurrent=object())
    [case] = graphs.cases
    with caplog.at_level(logging.WARNING):
        graphs.capture(case, None, inputs)
    assert "cannot be recorded: where the recurrent states lie" in caplog.text
    assert graphs.dispatch(BatchShape(num_tokens=1, num_reqs=1)).mode == "eager"
