"""Steps that are padded to multiples of 8, and run eagerly, give the tokens of steps as they are."""

import attrs
import pytest
from graph_workers import GREEDY, PROMPTS, RUNNERS

from workerkit.framework.testing.fakes import FakeGraph

PADDED = {"use": "fake", "multiple": 8}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("attention", ["cpu", "reference"])
@pytest.mark.parametrize("kernels", [["cpu", "reference"], ["reference"]], ids=["cpu", "plain"])
def test_padding_changes_no_token(make, runner, attention, kernels):
    limits = {"limits.max_num_reqs": 8}
    parts = {"attention": attention, "kernels": kernels, "overrides": limits}
    padded = make(runner, PADDED, **parts)
    assert padded.tokens() == make(runner, **parts).tokens()
    descs = [call.args["desc"] for call in padded.recorder.of("graph.run")]
    assert {desc.num_tokens % 8 for desc in descs} == {0}
    assert {desc.num_reqs for desc in descs} == {8}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("attention", ["cpu", "reference"])
def test_padding_changes_no_token_of_rows_with_drafts(make, runner, attention):
    overrides = {"limits.max_num_reqs": 8, "limits.num_speculative_tokens": 2}
    parts = {"attention": attention, "speculator": "stutter", "overrides": overrides}
    padded = make(runner, PADDED, **parts)
    assert padded.tokens() == make(runner, **parts).tokens()


@pytest.mark.parametrize("runner", RUNNERS)
def test_b162_a_smaller_step_leaves_nothing_of_a_larger_one(make, runner):
    """Four decodes, then three and a prefill: the tails of both, padded to 8 rows, are empty."""
    made = make(runner, PADDED, attention="reference", overrides={"limits.max_num_reqs": 8})
    engine = made.engine
    for length, prompt in zip((3, 9, 9, 9), PROMPTS, strict=False):
        engine.add_request(prompt[:3], attrs.evolve(GREEDY, max_tokens=length))
    for _ in range(3):
        engine.step()
    engine.add_request(PROMPTS[1], GREEDY)
    made.recorder.clear()
    while engine.has_unfinished:
        engine.step()
    batches = [call.args["batch"] for call in made.recorder.of("attention.build")]
    assert any(batch.num_reqs == 4 and batch.max_query_len == len(PROMPTS[1]) for batch in batches)
    for batch in batches:
        starts = batch.query_start_loc.tolist()
        assert starts == sorted(starts)
        assert starts == batch.query_start_loc_np.tolist()
        assert set(starts[batch.num_reqs :]) == {batch.num_tokens}
        assert not batch.seq_lens[batch.num_reqs :].any()
        assert not batch.input_ids[batch.num_tokens :].any()


def test_a_manager_is_asked_to_release_and_capture_in_its_own_time(make):
    made = make("v2", PADDED, overrides={"limits.max_num_reqs": 8}, attention="reference")
    assert isinstance(made.graph, FakeGraph)
    assert len(made.recorder.of("graph.capture")) == 1
    made.assembly.worker.sleep()
    assert len(made.recorder.of("graph.release")) == 1
    made.assembly.worker.wake_up()
    assert len(made.recorder.of("graph.capture")) == 2
