"""What the observer of phases records, and that it records nothing unasked."""

from itertools import pairwise

import pytest

from workerkit.components.observers.timings import Timings
from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.interfaces.request import NewRequest, SchedulerOutput
from workerkit.framework.interfaces.sampling_params import SamplingParams


def step(timings, drafts=False):
    timings.batch_prepared()
    timings.forward_finished()
    timings.tokens_sampled()
    if drafts:
        timings.drafts_proposed()
    timings.step_finished()


def names(phases):
    return [(phase.name, phase.step) for phase in phases]


def test_phases_follow_each_other_without_gaps():
    timings = Timings()
    timings.start()
    step(timings)
    step(timings, drafts=True)
    phases = timings.stop()
    plain = ["forward", "sample", "commit"]
    assert names(phases) == [(n, 1) for n in plain] + [(n, 2) for n in ("forward", "sample", "propose", "commit")]
    for group in (phases[:3], phases[3:]):
        assert all(before.end == after.begin for before, after in pairwise(group))
    assert all(phase.begin <= phase.end and phase.thread == "MainThread" for phase in phases)


def test_steps_count_while_nothing_is_recorded_and_half_a_step_is_left_out():
    timings = Timings()
    step(timings)
    assert timings.stop() == ()
    timings.batch_prepared()
    timings.start()
    timings.forward_finished()  # began before
    timings.step_finished()
    step(timings)
    assert names(timings.stop()) == [("forward", 3), ("sample", 3), ("commit", 3)]
    step(timings)
    timings.start()
    assert timings.stop() == ()


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_worker_reports_its_steps(runner):
    config = {
        "model": {"source": "none", "max_model_len": 64},
        "cache": {"block_size": 4, "num_blocks": 40},
        "components": {"runner": runner, "loader": "random", "kernels": ["reference"], "observers": ["timings"]},
    }
    with assemble(config) as assembly:
        assembly.worker.start()
        (timings,) = assembly.get_all(roles.OBSERVERS)
        timings.start()
        request = NewRequest(
            req_id="a",
            token_ids=(1, 2, 3),
            prompt_len=3,
            block_ids=((1,),),
            num_computed_tokens=0,
            sampling=SamplingParams(temperature=0.0, max_tokens=4),
        )
        assembly.worker.execute_model(SchedulerOutput(new_requests=(request,), num_scheduled_tokens={"a": 3}))
        assembly.worker.sample_tokens().get()
        phases = timings.stop()
    assert names(phases) == [("forward", 1), ("sample", 1), ("commit", 1)]
    assert {phase.thread for phase in phases} == {"workerkit-cpu-stream"}
