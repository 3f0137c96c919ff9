"""Workers whose steps are replayed give the tokens of eager ones; the recording device says what was captured."""

import gc
import logging

import attrs
import pytest
import torch
from graph_workers import GREEDY, PROMPTS, RUNNERS, AnyRows

from workerkit.components.device.memory_pool import StoragePool
from workerkit.components.graph.capture import StaticBuffers
from workerkit.framework import roles
from workerkit.framework.errors import IntegrityError
from workerkit.framework.interfaces.device import MemoryInfo
from workerkit.framework.interfaces.kv_cache import KVCaches
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.testing.fakes import FakeDevice
from workerkit.framework.testing.fakes_graph import CaptureError

MODES = {
    "decodes": ({"use": "cuda", "mode": "full_decode_only"}, "sdpa"),
    "pieces": ({"use": "cuda", "mode": "piecewise"}, "sdpa"),
    "pieces around attention that reads on the host": ({"use": "cuda", "mode": "piecewise"}, "reference"),
    "both": ({"use": "cuda", "capture_sizes": [2, 4, 6, 12, 32]}, "sdpa"),
    "everything": ({"use": "cuda", "mode": "full", "capture_sizes": [1, 4, 10, 32]}, "any_rows"),
}
MODELS = {
    "full": {},
    "two groups": {"num_hidden_layers": 3, "sliding_window": 6, "full_attention_interval": 3, "qk_norm": True},
}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("mode", MODES)
def test_replayed_steps_give_the_same_tokens(make, runner, mode):
    graph, attention = MODES[mode]
    eager = make(runner, attention=attention)
    captured = make(runner, graph, attention=attention)
    gc.collect()  # B154: graphs own what they read and write
    assert captured.tokens() == eager.tokens()
    modes = {desc.mode for desc in captured.replayed()}
    assert modes == {"decodes": {"full"}, "both": {"full", "piecewise"}, "everything": {"full"}}.get(
        mode, {"piecewise"}
    )
    captured.assembly.get(roles.ENGINE).check_integrity()


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("mode", ["decodes", "pieces"])
def test_sliding_windows_and_several_groups(make, runner, mode):
    graph, attention = MODES[mode]
    loader = MODELS["two groups"]
    tokens = [make(runner, g, attention=attention, loader=loader).tokens() for g in ("none", graph)]
    assert tokens[0] == tokens[1]


DRAFTS = {"limits.num_speculative_tokens": 2}


@pytest.mark.parametrize("runner", RUNNERS)
def test_rows_with_drafts_are_replayed_in_whole_rows(make, runner):
    eager = make(runner, overrides=DRAFTS, speculator="stutter")
    captured = make(runner, {"use": "cuda"}, overrides=DRAFTS, speculator="stutter")
    assert captured.tokens() == eager.tokens() == make(runner).tokens()
    assert {desc.uniform_query_len for desc in captured.replayed()} >= {3}
    sizes = {case.num_tokens for case in captured.graph.cases if case.mode == "full"}
    assert sizes
    assert {size % 3 for size in sizes} == {0}


@pytest.mark.parametrize("runner", RUNNERS)
def test_rows_with_unequal_drafts_are_replayed_where_only_their_number_is_bounded(make, runner):
    parts = {"overrides": DRAFTS, "speculator": "uneven", "attention": "any_rows"}
    captured = make(runner, {"use": "cuda", "mode": "full_decode_only", "varlen_decode": True}, **parts)
    assert captured.tokens() == make(runner, **parts).tokens()
    assert {desc.max_query_len for desc in captured.replayed()} >= {3}


@pytest.mark.parametrize("runner", RUNNERS)
def test_padding_writes_no_slot_and_reaches_no_logits(make, runner):
    """B33, B162, B163: everything a captured size adds is empty, whatever the step before left in the buffers."""
    graph = {"use": "cuda", "capture_sizes": [3, 12, 18, 31]}
    made = make(runner, graph, overrides=DRAFTS, speculator="stutter")
    made.recorder.clear()
    made.tokens()
    builds = made.recorder.of("attention.build_captured") + made.recorder.of("attention.build")
    padded_tokens = padded_rows = 0
    for call in builds:
        batch, tables = call.args["batch"], call.args["tables"]
        starts, lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        assert starts == sorted(starts)
        assert starts[batch.num_reqs :] == [batch.num_tokens] * (batch.num_reqs_padded - batch.num_reqs + 1)
        assert all(length >= 1 for length in lens[: batch.num_reqs])
        assert not any(lens[batch.num_reqs :])
        assert not batch.positions[batch.num_tokens :].any()
        for table, slots in zip(tables.block_tables, tables.slot_mappings, strict=True):
            assert set(slots[batch.num_tokens :].tolist()) <= {-1}
            assert min(slots[: batch.num_tokens].tolist()) >= 4, "neither nowhere nor in the null block"
            assert not table[batch.num_reqs :].any()
        padded_tokens += batch.num_tokens_padded > batch.num_tokens
        padded_rows += batch.num_reqs_padded > batch.num_reqs
    assert padded_tokens
    assert padded_rows
    sampled = made.recorder.of("sampler.process")
    assert [len(call.args["logits"]) for call in sampled] == [call.args["batch"].num_logits for call in sampled]
    for cache in (*(caches := made.assembly.value(KVCaches)).keys, *caches.values):
        assert torch.isfinite(cache).all()
        assert not cache[0].any(), "the null block is as it was"


@pytest.mark.parametrize("runner", RUNNERS)
def test_taps_come_out_of_graphs(make, runner):
    rows = {}
    for graph in ("none", {"use": "cuda"}, {"use": "cuda", "mode": "piecewise"}):
        made = make(runner, graph, observers=[{"use": "tap", "layers": ["layers.0", "embed"]}])
        rows[str(graph)] = seen = []
        made.assembly.get_all(roles.OBSERVERS)[0].subscribe(seen.append)
        made.tokens(PROMPTS[:2])
    eager, *others = rows.values()
    for other in others:
        assert [(row.req_id, row.first_position) for row in other] == [(r.req_id, r.first_position) for r in eager]
        for one, row in zip(eager, other, strict=True):
            for name, states in one.states.items():
                torch.testing.assert_close(row.states[name], states, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_forgets_graphs_and_waking_captures_them_again(make, runner, level):
    made = make(runner, {"use": "cuda"}, memory_pool="storage", model="native")
    before = made.tokens()
    count = len(made.graph.cases)
    captures = len(made.recorder.of("graph.capture"))
    assert captures == count
    worker = made.assembly.worker
    worker.sleep(level)
    assert ("reset", "main") in made.device.calls
    made.recorder.clear()
    worker.wake_up(("weights",))
    assert made.recorder.names("graph.capture") == [], "the cache still sleeps"
    worker.wake_up(("kv_cache",))
    assert len(made.recorder.of("graph.capture")) == count
    assert made.tokens() == before
    assert made.replayed()
    assert isinstance(made.assembly.get(roles.MEMORY_POOL), StoragePool)
    assert made.assembly.value(LoadedModel).network is not None


def test_all_graphs_of_a_worker_share_a_pool_and_a_stream_beside_the_steps(make):
    made = make("v2", {"use": "cuda", "capture_sizes": [2, 4]})
    layers = len(made.assembly.value(LoadedModel).network.attention_layers)
    begins = [call for call in made.device.calls if call[0].startswith("begin capture")]
    # Piecewise first, then decodes, each from large to small: 2 sizes of layers + 1 pieces, 2 of one graph.
    assert begins == [("begin capture in pool 1", "stream 1")] * (2 * (layers + 1) + 2)
    order = [(desc.mode, desc.num_tokens) for desc in made.graph.cases]
    assert order == [("piecewise", 4), ("piecewise", 2), ("full", 4), ("full", 2)]
    assert [call.args["desc"] for call in made.recorder.of("graph.capture")] == list(made.graph.cases)
    first = made.device.calls.index(("wait for main", "stream 1"))
    assert made.device.calls[first + 1] == ("synchronize", "stream 1"), "the warm-up is over before a capture begins"
    assert ("wait for stream 1", "main") in made.device.calls
    made.device.calls.clear()
    made.tokens(PROMPTS[:1])
    assert {stream for _, stream in made.device.calls} == {"main"}, "steps replay on their own stream"
    for call in made.recorder.of("graph.capture"):
        tables = made.recorder.of("block_table.gather")[0].result
        assert set(call.args["inputs"].input_ids.tolist()) == {0}
        assert {*tables.slot_mappings[0].tolist()} == {-1}, "a capture writes no KV"


def test_attention_that_reads_on_the_host_cannot_be_captured(make, workerkit_registry):
    class Liar(AnyRows):
        def build(self, batch, tables, caches, extras):
            attend = super().build(batch, tables, caches, extras)

            def reading(layer, query, key, value):
                if batch.seq_lens.max().item() >= 0:
                    return attend(layer, query, key, value)

            return reading

    workerkit_registry.add(roles.ATTENTION, "liar", Liar)
    with pytest.raises(CaptureError, match="item"):
        make("v2", {"use": "cuda"}, attention="liar")


def test_inputs_that_moved_are_refused(make):
    made = make("v2", {"use": "cuda"})
    made.recorder.clear()
    made.tokens(PROMPTS[:1])
    call = [c for c in made.recorder.of("graph.run") if c.args["desc"].mode == "full"][-1]  # its tensors are copies
    with pytest.raises(IntegrityError, match="do not lie where"):
        made.graph.run(call.args["desc"], call.args["forward"], call.args["inputs"])


def test_memory_is_estimated_from_the_two_largest(make, monkeypatch):
    made = make("v2", {"use": "cuda", "capture_sizes": [1, 2, 4, 8]})
    device = made.assembly.get(roles.DEVICE)
    free = iter([900, 870, 870, 868])
    monkeypatch.setattr(
        type(device), "memory", lambda self: MemoryInfo(free_bytes=next(free) << 20, total_bytes=1 << 30)
    )
    made.recorder.clear()
    count = len(made.graph.cases)
    assert made.assembly.get(roles.RUNNER).graph_memory() == (30 + (count - 1) * 2) << 20
    assert [call.args["desc"].num_tokens for call in made.recorder.of("graph.capture")] == [8, 4]
    assert made.recorder.names("graph.release") == ["graph.release"]


def test_the_cache_leaves_room_for_graphs(make, monkeypatch, caplog):
    monkeypatch.setattr(FakeDevice, "memory", lambda self: MemoryInfo(free_bytes=900 << 20, total_bytes=1 << 30))
    with caplog.at_level(logging.INFO):
        made = make("v2", {"use": "cuda"}, overrides={"cache.num_blocks": None, "cache.memory_fraction": 0.25})
    count = len(made.graph.cases)
    assert count > 2
    # Of 256 MiB 124 are in use and 64 kept in reserve, a step takes 1 KiB, and graphs 1 MiB each but the first.
    assert f"graphs take {count - 1}: {68 - count} MiB for the KV cache" in caplog.text
    assert made.tokens() == make("v2").tokens(), "the trial's graphs are gone"
    assert made.replayed()


def test_buffers_are_shared_by_all_sizes_and_never_move():
    buffers = StaticBuffers(8)
    large = buffers.copy("hidden", torch.ones(8, 3))
    small = buffers.copy("hidden", torch.zeros(2, 3))
    assert small.data_ptr() == large.data_ptr()
    assert large.sum() == 18
    assert buffers.like("hidden", torch.ones(2, 4)).data_ptr() != large.data_ptr()


def test_a_sampled_and_a_greedy_request_in_one_replayed_batch(make):
    seeded = attrs.evolve(GREEDY, temperature=1.0, seed=7)
    tokens = []
    for graph in ("none", {"use": "cuda"}):
        made = make("v2", graph)
        results = made.engine.generate([PROMPTS[0], PROMPTS[2]], [GREEDY, seeded])
        tokens.append([result.token_ids for result in results])
    assert tokens[0] == tokens[1]
