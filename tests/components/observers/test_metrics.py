"""What the metrics count, step by step, and on both runners."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from workerkit.components.observers.metrics import Metrics, MetricsConfig
from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.interfaces.request import ModelRunnerOutput, SchedulerOutput
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.testing.registry import fake_config, fake_registry

PAGE = Path(__file__).resolve().parents[3] / "docs/metrics.md"


@pytest.fixture
def metrics():
    return Metrics(MetricsConfig())


def value(metrics, name, **labels):
    return metrics.registry.get_sample_value(f"workerkit_{name}", labels)


def speculation(metrics, num_positions):
    """drafts, draft tokens, accepted tokens, accepted by position, rate, mean length."""
    return (
        *(value(metrics, f"spec_{name}_total") for name in ("drafts", "draft_tokens", "accepted_tokens")),
        [
            value(metrics, "spec_accepted_tokens_per_position_total", position=str(position))
            for position in range(1, num_positions + 1)
        ],
        value(metrics, "spec_acceptance_rate"),
        value(metrics, "spec_mean_accepted_length"),
    )


def scheduled(leaving=(), preempted=(), **drafts):
    return SchedulerOutput(
        num_scheduled_tokens={name: 1 + count for name, count in drafts.items()},
        scheduled_drafts={name: count for name, count in drafts.items() if count},
        finished_req_ids=frozenset(leaving),
        preempted_req_ids=frozenset(preempted),
    )


def answer(**rows):
    """Of each request: how many tokens, and how many new drafts."""
    return ModelRunnerOutput(
        req_ids=tuple(rows),
        sampled_token_ids=tuple((1,) * tokens for tokens, _ in rows.values()),
        draft_token_ids=tuple((2,) * drafts for _, drafts in rows.values()),
    )


def test_b127_what_is_a_draft_and_what_is_a_rate(metrics):
    """B127: K = 3, accepted 0, 3 and 1 in three steps. One request or three of them make no difference."""
    metrics.step_started(scheduled(a=0))
    metrics.output_ready(answer(a=(1, 3)))
    for accepted in (0, 3, 1):
        metrics.step_started(scheduled(a=3))
        metrics.output_ready(answer(a=(1 + accepted, 3)))
    expected = (3, 9, 4, [2, 1, 1], pytest.approx(0.444, abs=1e-3), pytest.approx(2.333, abs=1e-3))
    assert speculation(metrics, 3) == expected
    together = Metrics(MetricsConfig())
    together.step_started(scheduled(a=0, b=0, c=0))
    together.output_ready(answer(a=(1, 3), b=(1, 3), c=(1, 3)))
    together.step_started(scheduled(a=3, b=3, c=3))
    together.output_ready(answer(c=(1, 3), a=(4, 3), b=(2, 3)))
    assert speculation(together, 3) == expected


def test_no_draft_is_no_draft(metrics):
    """A request without drafts, a proposal of none, a piece of a prompt: nothing of that counts."""
    metrics.step_started(scheduled(a=0, b=0))
    metrics.output_ready(answer(a=(1, 0), b=(0, 0)))
    metrics.step_started(scheduled(a=0, b=0))
    metrics.output_ready(answer(a=(1, 2), b=(1, 0)))
    assert speculation(metrics, 1) == (0, 0, 0, [None], 0, 0)
    metrics.step_started(scheduled(a=1, b=0))  # two are held, and one fits
    metrics.output_ready(answer(a=(1, 2), b=(1, 1)))
    assert speculation(metrics, 2) == (1, 1, 0, [0, None], 0, 1)


def test_two_steps_in_flight_are_kept_apart(metrics):
    """A step's drafts are those of the answer before it, although it was planned, with K placeholders, before that."""
    metrics.step_started(scheduled(a=0, b=0))
    metrics.step_started(scheduled(a=3, b=3))
    metrics.output_ready(answer(a=(1, 1), b=(1, 0)))  # so of these six one is real
    metrics.step_started(scheduled(a=3, b=3))
    metrics.output_ready(answer(a=(2, 3), b=(1, 2)))
    assert speculation(metrics, 2) == (1, 1, 1, [1, None], 1, 2)
    metrics.step_started(scheduled(a=3, b=3))
    metrics.output_ready(answer(a=(3, 0), b=(1, 3)))
    assert speculation(metrics, 3) == (3, 6, 3, [2, 1, 0], 0.5, 2)
    metrics.output_ready(answer(a=(1, 0), b=(4, 0)))
    assert speculation(metrics, 3) == (4, 9, 6, [3, 2, 1], pytest.approx(2 / 3), 2.5)


def test_the_time_of_a_step_is_its_own(metrics):
    times = iter([10.0, 11.0, 14.0, 20.0, 26.0, 27.0])
    metrics._now = lambda: next(times)
    metrics.step_started(scheduled(a=0))  # 10
    metrics.step_started(scheduled(a=0))  # 11
    metrics.output_ready(answer(a=(1, 0)))  # 14
    assert value(metrics, "step_seconds_sum") == 4
    metrics.step_started(scheduled(a=0))  # 20
    metrics.output_ready(answer(a=(1, 0)))  # 26
    assert value(metrics, "step_seconds_sum") == 4 + 15
    metrics.output_ready(answer(a=(1, 0)))  # 27
    assert value(metrics, "step_seconds_sum") == 4 + 15 + 7
    assert value(metrics, "step_seconds_count") == value(metrics, "steps_total") == 3


def test_draft_and_verify_time(metrics):
    """Verify time is that of steps with drafts; draft time is that of every step."""
    times = iter([5.0, 5.5, 10.0, 13.0, 13.25])
    metrics._now = lambda: next(times)
    for num_drafts in ([0, 0], [0, 2]):
        plan = SimpleNamespace(num_draft_tokens=np.array(num_drafts, np.int32))
        metrics.batch_prepared(SimpleNamespace(num_reqs=2, num_tokens=2, plan=plan))
        assert value(metrics, "spec_verify_seconds_count") == 0
        metrics.tokens_sampled()
        metrics.drafts_proposed()
    assert value(metrics, "spec_verify_seconds_sum") == 3
    assert value(metrics, "spec_verify_seconds_count") == 1
    assert value(metrics, "spec_draft_seconds_sum") == 0.75
    assert value(metrics, "spec_draft_seconds_count") == 2


@pytest.mark.parametrize("how", ["leaving", "preempted"])
def test_a_request_that_left_takes_its_drafts_along(metrics, how):
    """Its last answer may arrive after the step that says it is gone has started, and its id may be used again."""
    metrics.step_started(scheduled(a=0))
    metrics.step_started(scheduled(a=0, **{how: "a"}))
    metrics.output_ready(answer(a=(1, 3)))
    assert not metrics._speculation._held
    metrics.output_ready(answer(a=(1, 2)))
    assert metrics._speculation._held == {"a": 2}
    metrics.step_started(scheduled(**{how: "a"}))  # nothing is in flight, and this step has no tokens
    assert not metrics._speculation._held
    assert not metrics._in_flight


# Of whole workers


def run(runner, async_scheduling, num_drafts=3, **components):
    config = fake_config(
        runner,
        scheduler={"use": "continuous", "async_scheduling": async_scheduling},
        engine="standalone",
        observers=["metrics"],
        **components,
    )
    config["limits"]["num_speculative_tokens"] = num_drafts
    with assemble(config, registry=fake_registry()) as assembly:
        assembly.engine.start()
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 17, 30, 2, 1)]
        results = assembly.engine.generate([[1, 2], [3] * 20, [4], [5, 6, 7], [8]], params)
        (metrics,) = assembly.get_all(roles.OBSERVERS)
        assert not metrics._in_flight
        assert not metrics._speculation._held
        assert not assembly.worker.check_health().degraded
        return metrics, assembly.engine.stats, [result.token_ids for result in results]


@pytest.mark.parametrize(("runner", "async_scheduling"), [("v1", False), ("v2", False), ("v2", True)])
def test_metrics_and_engine_count_alike(runner, async_scheduling):
    plain, _, tokens = run(runner, async_scheduling, 0, speculator="none")
    metrics, stats, same = run(runner, async_scheduling)
    assert same == tokens
    totals = [value(metrics, f"spec_{name}_total") for name in ("drafts", "draft_tokens", "accepted_tokens")]
    assert totals == [stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens]
    assert 0 < totals[0] < totals[2] < totals[1]
    assert value(metrics, "steps_total") == stats.num_steps < value(plain, "steps_total")
    assert value(metrics, "spec_draft_seconds_count") == stats.num_steps
    assert 0 < value(metrics, "spec_verify_seconds_count") < stats.num_steps
    for count in ("drafts_total", "draft_seconds_count", "verify_seconds_count"):
        assert value(plain, f"spec_{count}") == 0


def test_every_metric_is_defined_in_the_docs(metrics):
    metrics.step_started(scheduled(a=0))
    metrics.output_ready(answer(a=(1, 1)))
    metrics.step_started(scheduled(a=1))
    metrics.output_ready(answer(a=(1, 1)))
    names = set()
    for family in metrics.registry.collect():
        if not family.name.endswith("_created"):
            names.add(family.name.removeprefix("workerkit_") + ("_total" if family.type == "counter" else ""))
    documented = set(re.findall(r"^\| `(\w+)(?:\{.*?\})?`", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert names == documented
