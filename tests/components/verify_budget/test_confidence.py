"""How many drafts are kept under made-up costs."""

import itertools

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from workerkit.components.verify_budget.confidence import ConfidenceBudget, ConfidenceBudgetConfig
from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.interfaces.batch import BatchPlan
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.graph import BatchDescriptor
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.speculation import Drafts
from workerkit.framework.testing.fakes_batch import make_batch
from workerkit.framework.testing.registry import fake_config, fake_registry

CPU = torch.device("cpu")
R, K = 4, 3


def new_budget(seconds=None, tokens=64, **config):
    shape = WorkerShape(
        max_model_len=64, max_num_reqs=R, max_num_batched_tokens=tokens, vocab_size=10, num_speculative_tokens=K
    )
    budget = ConfidenceBudget(ConfidenceBudgetConfig(**config), shape, DeviceContext(device=CPU, dtype=torch.float32))
    if seconds:
        budget.calibrate(seconds)
    return budget


def decodes(rows, partial=0):
    """Rows that decode, and behind them some whose prefill goes on."""
    ones = np.ones(rows + partial, dtype=np.int32)
    lens = ones + np.array([0] * rows + [9] * partial, dtype=np.int32)
    plan = BatchPlan(
        req_ids=tuple(map(str, range(rows + partial))), slots=np.arange(rows + partial), num_scheduled_tokens=ones,
        num_computed_tokens=ones * 0, num_draft_tokens=ones * 0, prefill_lens=lens, prompt_lens=lens,
    )  # fmt: skip
    desc = BatchDescriptor(num_tokens=len(ones), num_reqs=len(ones))
    return make_batch(plan, [0] * len(ones), [[1]] * len(ones), desc, CPU)


def kept(budget, confidence, token_ids=None, partial=0):
    """How many drafts each row keeps; what is kept is a prefix, and as it was."""
    confidence = torch.tensor(confidence)
    tokens = torch.arange(confidence.numel()).view_as(confidence) if token_ids is None else torch.tensor(token_ids)
    batch = decodes(len(confidence) - partial, partial)
    trimmed = budget.trim(Drafts(token_ids=tokens, confidence=confidence), batch).token_ids
    counts = (trimmed >= 0).sum(1)
    for row, count in enumerate(counts.tolist()):
        assert trimmed[row, :count].tolist() == tokens[row, :count].tolist()
        assert trimmed[row, count:].tolist() == [-1] * (confidence.shape[1] - count)
    return counts.tolist()


def flat(num_tokens, num_reqs):
    return 1.0


def linear(num_tokens, num_reqs):
    return float(num_tokens)


def test_cheap_verification_keeps_all():
    assert kept(new_budget(flat), [[0.1, 0.1, 0.1], [0.9, 0.01, 0.5]]) == [3, 3]


def test_a_step_whose_cost_grows_with_every_token_keeps_none():
    """A draft yields less than the token that a request yields for the same price without it."""
    assert kept(new_budget(linear), [[0.9, 0.9, 0.9], [0.99, 0.5, 0.5]]) == [0, 0]


def test_steep_costs_keep_few_and_the_likelier():
    """A token costs a quarter of a step: drafts that are likely are worth it."""
    budget = new_budget(lambda n, _: 1.0 + 0.25 * n)
    assert kept(budget, [[0.95, 0.9, 0.05], [0.3, 0.9, 0.9]]) == [2, 0]
    assert kept(budget, [[0.3, 0.9, 0.9], [0.95, 0.9, 0.05]]) == [0, 2]


def test_a_budget_goes_to_the_likelier_drafts_of_any_request():
    """Up to six tokens a step costs the same, then too much: two requests, so four drafts."""
    budget = new_budget()
    budget._costs = torch.tensor([1.0] * 7 + [100.0] * 10, dtype=torch.float64)
    assert kept(budget, [[0.9, 0.9, 0.9], [0.8, 0.1, 0.9]]) == [3, 1]
    assert kept(budget, [[0.5, 0.5, 0.5], [0.9, 0.9, 0.9]]) == [1, 3]
    assert kept(budget, [[0.9, 0.1, 0.1], [0.9, 0.1, 0.1]]) == [2, 2]


def test_it_is_the_best_of_all_choices():
    """Compared with every combination of prefixes, for random confidences and rising costs."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        costs = np.cumsum(rng.random(R * (K + 1) + 1)) + 1.0
        budget = new_budget()
        budget._costs = torch.from_numpy(costs)
        confidence = rng.random((R, K)) ** 0.3
        survival = confidence.cumprod(1)

        def rate(counts, survival=survival, costs=costs):
            expected = R + sum(survival[row, :count].sum() for row, count in enumerate(counts))
            return expected / costs[R + sum(counts)]

        best = max(itertools.product(range(K + 1), repeat=R), key=rate)
        assert rate(kept(budget, confidence.tolist())) == pytest.approx(rate(best), rel=1e-6)


def test_equally_likely_drafts_are_kept_from_the_front():
    budget = new_budget()
    budget._costs = torch.tensor([1.0] * 5 + [100.0] * 12, dtype=torch.float64)
    assert kept(budget, [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]) == [2, 0]


def test_drafts_that_are_too_unlikely_are_dropped():
    assert kept(new_budget(flat, min_survival=0.5), [[0.9, 0.6, 0.9], [0.4, 1.0, 1.0], [0.8, 0.8, 0.8]]) == [2, 0, 3]


def test_places_without_a_draft_cost_nothing_and_end_the_row():
    tokens = [[1, -1, -1], [2, 3, 4], [-1, -1, -1]]
    assert kept(new_budget(flat), [[0.9, 0.9, 0.9]] * 3, tokens) == [1, 3, 0]


def test_rows_whose_prefill_goes_on_take_no_share():
    budget = new_budget()
    budget._costs = torch.tensor([1.0] * 4 + [100.0] * 13, dtype=torch.float64)  # one request and two drafts
    assert kept(budget, [[0.5, 0.5, 0.5], [1.0, 1.0, 1.0]], partial=1) == [2, 0]


def test_confidences_that_are_no_numbers_count_as_none():
    assert kept(new_budget(flat), [[0.9, float("nan"), 0.9], [2.0, 0.5, 0.5]]) == [1, 3]


def test_no_more_than_a_step_may_hold():
    budget = new_budget(flat, tokens=6)
    assert sum(kept(budget, [[0.9, 0.9, 0.9]] * 3)) == 3


def test_without_confidence_or_measurement_nothing_is_lost():
    drafts = Drafts(token_ids=torch.tensor([[1, 2, 3]]))
    assert new_budget(linear).trim(drafts, decodes(1)) is drafts
    assert kept(new_budget(), [[0.1, 0.1, 0.1]]) == [3]


def test_what_is_not_trimmed_stays():
    logits = torch.zeros(1, K, 10)
    drafts = Drafts(token_ids=torch.tensor([[1, 2, 3]]), logits=logits, confidence=torch.tensor([[0.5] * 3]))
    trimmed = new_budget(linear).trim(drafts, decodes(1))
    assert trimmed.logits is logits
    assert trimmed.confidence is drafts.confidence
    assert drafts.token_ids.tolist() == [[1, 2, 3]], "the proposer's tensor is its own"


def test_calibration_measures_powers_of_two_up_to_the_largest_step():
    """Twelve: more than a power; costs are interpolated, never fall, and what prepares a size is not counted."""
    asked, runs = [], {}

    def seconds(num_tokens, num_reqs):
        asked.append((num_tokens, num_reqs))
        runs[num_tokens] = runs.get(num_tokens, 0) + 1
        return 50.0 if runs[num_tokens] == 1 else {1: 1.0, 2: 2.0, 4: 1.5, 8: 4.0, 12: 6.0}[num_tokens]

    budget = new_budget(seconds, tokens=12)
    assert sorted(set(asked)) == [(1, 1), (2, 2), (4, 4), (8, 4), (12, 4)]
    assert budget._costs.tolist() == [1, 1, 2, 2, 2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5, 6, *[np.inf] * 4]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_worker_measures_when_it_starts(runner):
    config = fake_config(runner, worker="npu", verify_budget="confidence")
    config["limits"]["num_speculative_tokens"] = K
    with assemble(config, registry=fake_registry()) as assembly:
        assembly.worker.start()
        costs = assembly.get(roles.VERIFY_BUDGET)._costs.tolist()
    assert len(costs) == 8 * (K + 1) + 1
    assert costs == sorted(costs)
    assert 0 < costs[0] < costs[-1] < 1, "seconds of a step, and not what stands there before"


class NoSync(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"), name
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device():
    budget, batch = new_budget(linear), decodes(2, 1)
    drafts = Drafts(token_ids=torch.zeros(3, K, dtype=torch.int64), confidence=torch.rand(3, K))
    with NoSync():
        budget.trim(drafts, batch)
