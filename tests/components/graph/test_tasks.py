"""Ops that take lengths from the host: a graph remembers them, so each replay has them launched anew, on time.

The device and the backend are recording fakes: no op of CUDA needs this, an NPU's attention does.
"""

from types import SimpleNamespace

import pytest
import torch
from graph_workers import GREEDY, PROMPTS, RUNNERS

from workerkit.components.graph.tasks import UpdatableTasks
from workerkit.framework import roles
from workerkit.framework.errors import IntegrityError, UnsupportedError
from workerkit.framework.interfaces.attention import AttentionBackend
from workerkit.framework.interfaces.device import GraphDevice
from workerkit.framework.interfaces.graph import GraphTasks
from workerkit.framework.interfaces.kernels import Kernels
from workerkit.framework.testing.fakes_graph import FakeGraphDevice


class HostLengthAttention(AttentionBackend):
    """Decodes in the manner of npu_fused_infer_attention_score: the length of each row is a number of the host."""

    graph_support = "uniform"
    host_lengths = "exact"
    tells = True

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.num_layers = 0

    def prepare(self, layers, dtype):
        self.num_layers = len(layers)

    def build(self, batch, tables, caches, extras):
        return self._attend(batch, tables, caches, GraphTasks())

    def build_captured(self, batch, tables, caches, extras, desc, tasks):
        return self._attend(batch, tables, caches, tasks)

    def host_parameters(self, batch, tables):
        padding = [0] * (batch.num_reqs_padded - batch.num_reqs)
        lengths = [*batch.host_seq_lens.exact().tolist(), *padding]
        return {"decode": [{"lengths": lengths}] * self.num_layers} if self.tells else {}

    def _attend(self, batch, tables, caches, tasks):
        lengths = [*batch.host_seq_lens.exact().tolist(), *[0] * (batch.num_reqs_padded - batch.num_reqs)]
        starts = [*batch.query_start_loc_np.tolist()]
        if batch.max_query_len == 1:  # as a graph of decodes is laid out, rows that are padding included
            starts = [*range(batch.num_reqs_padded + 1)]

        def attend(layer, query, key, value):
            group = caches.group_of_layer[layer.index]
            keys, values = caches.keys[layer.index], caches.values[layer.index]
            self.kernels.reshape_and_cache(key, value, keys, values, tables.slot_mappings[group])
            table, output = tables.block_tables[group], torch.zeros_like(query)

            def op(parameters):
                output.zero_()
                for row, length in enumerate(parameters["lengths"]):
                    if length:
                        queries = slice(starts[row], starts[row + 1])
                        columns = table[row, : -(-length // keys.shape[1])]
                        output[queries] = self.kernels.prefill_attention(
                            query[queries], keys, values, columns, length, layer.scale, layer.sliding_window
                        )

            tasks.launch("decode", op, {"lengths": lengths})
            return output

        return attend


class Silent(HostLengthAttention):
    """Forgets to say what the lengths are now."""

    tells = False


@pytest.fixture
def workers(make, workerkit_registry):
    workerkit_registry.add(roles.ATTENTION, "host_lengths", HostLengthAttention)
    workerkit_registry.add(roles.ATTENTION, "silent", Silent)
    return make


@pytest.mark.parametrize("runner", RUNNERS)
def test_replays_see_the_lengths_of_their_own_step(workers, runner):
    captured = workers(runner, {"use": "cuda", "mode": "full_decode_only"}, attention="host_lengths")
    assert captured.tokens() == workers(runner).tokens()
    assert captured.replayed()
    assert captured.device.is_idle, "each replay has come to its end"


def test_updates_run_beside_the_replay_that_waits_for_them_and_never_before_the_last_one(workers):
    made = workers("v2", {"use": "cuda", "mode": "full_decode_only"}, attention="host_lengths")
    made.recorder.clear()
    made.device.calls.clear()
    made.tokens(PROMPTS[:1])
    layers = len(made.recorder.of("network.forward")[0].args["inputs"].host_parameters.get("decode", ())) or 2
    update = [("begin update", "stream 2"), ("end update", "stream 2"), ("event.record", "stream 2")]
    replay = [("wait for main", "stream 2"), ("replay", "main"), *update * layers]
    assert made.device.calls == replay * len(made.replayed())


def test_an_op_is_captured_as_a_task_that_waits_for_its_event(workers):
    made = workers("v2", {"use": "cuda", "mode": "full_decode_only", "capture_sizes": [1]}, attention="host_lengths")
    task = [(what, "stream 1") for what in ("event.wait", "event.reset", "begin task", "end task")]
    begin = made.device.calls.index(("begin capture in pool 1", "stream 1"))
    end = made.device.calls.index(("end capture", "stream 1"))
    assert made.device.calls[begin + 1 : end] == task * 2, "one for each layer"


def test_a_replay_without_parameters_for_its_tasks_is_refused(workers, caplog):
    made = workers("v2", {"use": "cuda", "mode": "full_decode_only"}, attention="silent")
    made.engine.generate(PROMPTS[:1], GREEDY)
    assert "host parameters for {} ops, the graph holds {'decode': 2}" in caplog.text


def test_as_many_parameters_as_ops_of_each_provider():
    device = FakeGraphDevice()
    tasks = UpdatableTasks(device)
    seen = []
    output = torch.zeros(1)
    graph = device.new_graph()
    graph.capture_begin()
    with tasks.recorded() as recorded:
        for provider in ("a", "b", "a"):
            tasks.launch(provider, lambda p, own=provider: seen.append((own, p["n"])) or output.add_(p["n"]), {"n": 1})
    graph.capture_end()
    output.zero_()
    seen.clear()
    tasks.replay(graph.replay, recorded, {"a": [{"n": 10}, {"n": 20}], "b": [{"n": 300}]})
    assert seen == [("a", 10), ("b", 300), ("a", 20)]
    assert device.is_idle
    for wrong in ({"a": [{"n": 1}]}, {"a": [{"n": 1}] * 2, "b": [{"n": 1}] * 2}, {}):
        device.calls.clear()
        with pytest.raises(IntegrityError):
            tasks.replay(graph.replay, recorded, wrong)
        assert device.calls == [], "nothing is replayed"
    with pytest.raises(IntegrityError, match="the graph holds"):
        tasks.replay(graph.replay, [], {"a": [{"n": 1}]})


def test_outside_a_capture_an_op_is_just_launched():
    device, seen = FakeGraphDevice(), []
    for tasks in (UpdatableTasks(device), GraphTasks()):
        tasks.launch("a", seen.append, {"n": 1})
    assert seen == [{"n": 1}] * 2
    assert device.calls == []


def test_a_device_without_such_ops_says_so():
    class Plain(GraphDevice):
        new_stream = current_stream = new_pool = new_graph = lambda self: SimpleNamespace()
        use = lambda self, stream: None  # noqa: E731

    plain = Plain()
    for call in (
        plain.new_event,
        lambda: plain.begin_task(None),
        lambda: plain.end_task(None),
        lambda: plain.begin_update(None, None),
        lambda: plain.end_update(None),
    ):
        with pytest.raises(UnsupportedError, match="lengths from the host"):
            call()
