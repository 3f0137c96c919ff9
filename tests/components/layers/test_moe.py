"""Which experts a router chooses and how they are weighted, worked out token by token."""

import math

import pytest
import torch

from workerkit.components.layers.moe import sigmoid_top_k
from workerkit.framework.interfaces.model import MoEConfig


def config(number=8, per_token=3, groups=4, kept=2, **options):
    return MoEConfig(
        num_experts=number,
        num_experts_per_tok=per_token,
        num_groups=groups,
        top_k_groups=kept,
        intermediate_size=1,
        sparse_layers=(),
        routing="sigmoid",
        **options,
    )


def chosen_of_one(logits, bias, c):
    """{expert: weight} of one token, lists in."""
    scores = [1 / (1 + math.exp(-x)) for x in logits]
    biased = [score + b for score, b in zip(scores, bias, strict=True)]
    size = c.num_experts // c.num_groups
    members = [range(g * size, (g + 1) * size) for g in range(c.num_groups)]
    worth = [sum(sorted((biased[e] for e in group), reverse=True)[:2]) for group in members]
    best = sorted(range(c.num_groups), key=lambda g: worth[g], reverse=True)[: c.top_k_groups]
    chosen = sorted((e for g in best for e in members[g]), key=lambda e: biased[e], reverse=True)
    weights = {e: scores[e] for e in chosen[: c.num_experts_per_tok]}
    total = sum(weights.values()) if c.normalize else 1.0
    return {e: weight / total * c.scaling for e, weight in weights.items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"groups": 1, "kept": 1},
        {"groups": 2, "kept": 1, "per_token": 4},
        {"groups": 8, "kept": 3},
        {"normalize": False, "scaling": 2.5},
        {"number": 64, "groups": 8, "kept": 4, "per_token": 8, "scaling": 2.5},
    ],
)
def test_sigmoid_routing_is_what_each_token_chooses_alone(options):
    c = config(**options)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, c.num_experts, generator=generator)
    bias = torch.randn(c.num_experts, generator=generator)  # large enough to change most choices
    ids, weights = sigmoid_top_k(logits, bias, c)
    assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
    for row, got in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        expected = chosen_of_one(logits[row].tolist(), bias.tolist(), c)
        assert dict(zip(*got, strict=True)) == pytest.approx(expected, abs=1e-6)
    unbiased, _ = sigmoid_top_k(logits, torch.zeros_like(bias), c)
    assert (unbiased.sort().values != ids.sort().values).any()


def test_the_bias_serves_the_choice_alone():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0])
    ids, weights = sigmoid_top_k(logits, bias, config(4, 2, 1, 1))
    assert ids.tolist() == [[3, 0]]
    scores = torch.tensor([-1.0, 2.0]).sigmoid()
    torch.testing.assert_close(weights[0], scores / scores.sum())


def test_the_best_expert_of_a_closed_group_is_not_chosen():
    """Two good ones are worth more than the best one beside a bad one."""
    logits = torch.tensor([[4.0, -9.0, 0.5, 0.5]])
    assert sorted(sigmoid_top_k(logits, torch.zeros(4), config(4, 2, 2, 1))[0][0].tolist()) == [2, 3]


def test_closed_groups_stay_closed_where_open_scores_are_negative():
    bias = torch.tensor([-3.0, -3.0, -2.0, -2.0])
    ids, weights = sigmoid_top_k(torch.zeros(1, 4), bias, config(4, 2, 2, 1))
    assert sorted(ids[0].tolist()) == [2, 3]
    assert weights.tolist() == [[0.5, 0.5]]


def test_ties_yield_as_many_different_experts_of_as_many_groups():
    c = config(number=12, per_token=5, groups=4, kept=2)
    ids, weights = sigmoid_top_k(torch.zeros(7, 12), torch.zeros(12), c)
    for row in ids.tolist():
        assert len(set(row)) == 5
        assert len({expert // 3 for expert in row}) == 2
    torch.testing.assert_close(weights, torch.full((7, 5), 0.2))
