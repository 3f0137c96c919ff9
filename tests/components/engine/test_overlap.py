"""Asynchronous scheduling overlaps: while a step's forward runs, the next step is scheduled and planned, and the tokens
of the one before are detokenised and handed out.

Every forward is held until both have happened, and both wait until that forward has begun. Without the overlap one side
would wait for the other for good, so the test fails at the first wait that lasts; no clock is read.
"""

import threading

import pytest
import torch
from letters import EOS, LETTERS, VOCAB, Letters
from table_model import add_table_model

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.testing.registry import fake_registry

STEPS = 6
AT_MOST = 30  # seconds until a wait counts as endless


class Stages:
    """What has happened to each step, in order."""

    def __init__(self):
        self.log = []
        self._changed = threading.Condition()

    def reach(self, what, step):
        with self._changed:
            self.log.append((what, step))
            self._changed.notify_all()

    def wait(self, what, step):
        with self._changed:
            if not self._changed.wait_for(lambda: (what, step) in self.log, AT_MOST):
                raise AssertionError(f"step {step} is never {what}; so far: {self.log}")

    def count(self, what):
        with self._changed:
            return sum(reached == what for reached, _ in self.log)


@pytest.fixture
def assembly():
    registry = fake_registry()
    table = torch.nn.functional.one_hot(torch.arange(1, VOCAB + 1) % EOS, VOCAB)  # b after a, c after b, …
    add_table_model(registry, table)
    registry.add(roles.TOKENIZER, "letters", Letters)
    config = {
        "model": {"source": "table", "max_model_len": 64},
        "limits": {"max_num_reqs": 4, "max_num_batched_tokens": 32},
        "cache": {"block_size": 4, "num_blocks": 64},
        "components": {
            "runner": "v2",
            "model": "table",
            "loader": "table",
            "tokenizer": "letters",
            "graph": "none",
            "attention": "reference",
            "kernels": ["reference"],
            "scheduler": {"use": "continuous", "async_scheduling": True},
        },
    }
    with assemble(config, registry=registry) as made:
        made.engine.start()
        yield made


def hold(assembly, stages):
    """Hold every forward until the step after it is planned and the tokens of the one before are handed out, and those
    two until that forward has begun."""
    network, scheduler = assembly.value(LoadedModel).network, assembly.get(roles.SCHEDULER)
    worker, tokenizer = assembly.worker, assembly.get(roles.TOKENIZER)
    forward, schedule = network.forward, scheduler.schedule
    execute, token_bytes = worker.execute_model, tokenizer.token_bytes

    def held_forward(inputs):
        step = stages.count("begun") + 1
        stages.reach("begun", step)
        if step < STEPS:
            stages.wait("planned", step + 1)
        if step > 1:
            stages.wait("handed out", step - 1)
        output = forward(inputs)
        stages.reach("computed", step)
        return output

    def held_schedule():
        step = stages.count("scheduled") + 1
        if 1 < step <= STEPS:
            stages.wait("begun", step - 1)
        output = schedule()
        if output.num_scheduled_tokens:
            stages.reach("scheduled", step)
        return output

    def planned(output):
        answer = execute(output)
        if output.num_scheduled_tokens:
            stages.reach("planned", stages.count("planned") + 1)
        return answer

    def held_token_bytes(token_id):
        step = stages.count("handed out") + 1
        if step < STEPS:
            stages.wait("begun", step + 1)
        stages.reach("detokenised", step)
        return token_bytes(token_id)

    network.forward, scheduler.schedule, worker.execute_model = held_forward, held_schedule, planned
    tokenizer.token_bytes = held_token_bytes


def test_a_forward_hides_the_scheduling_of_the_next_step_and_the_text_of_the_last(assembly):
    engine, stages = assembly.engine, Stages()
    engine.add_request([0], SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True))
    hold(assembly, stages)
    text = ""
    while engine.has_unfinished:
        for delta in engine.step():
            text += delta.text
            stages.reach("handed out", stages.count("handed out") + 1)
    assert text == LETTERS[1 : STEPS + 1]
    place = {event: position for position, event in enumerate(stages.log)}
    for step in range(2, STEPS):
        during = [("scheduled", step + 1), ("planned", step + 1), ("detokenised", step - 1), ("handed out", step - 1)]
        assert all(place["begun", step] < place[event] < place["computed", step] for event in during)
    engine.check_integrity()
