"""Truncation by hand, and against transformers; in both libraries."""

import math

import pytest
import torch
from transformers.generation import logits_process

from workerkit.kernels import cpu, reference

INF = float("inf")


@pytest.fixture(params=["reference", "cpu"])
def ops(request):
    return {"reference": reference, "cpu": cpu}[request.param].OPS


def support(logits):
    return [row.isfinite().nonzero().flatten().tolist() for row in logits]


def k_of(*values):
    return torch.tensor(values, dtype=torch.int32)


def p_of(*values):
    return torch.tensor(values, dtype=torch.float32)


def logits_of(*probs):
    return torch.tensor([probs]).log()


def random_logits(seed=0, rows=8, vocab=3000, scale=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def test_b01_ties_at_k_are_kept_whatever_the_batch_size(ops):
    row = torch.tensor([1.0, 2.0, 2.0, 2.0, 3.0])
    alone = ops["apply_top_k_top_p_npu"](row[None].clone(), k_of(3), None)
    batch = ops["apply_top_k_top_p_npu"](torch.cat((row[None], torch.randn(8, 5))), k_of(3, *[2] * 8), None)
    assert support(alone) == [[1, 2, 3, 4]]
    assert support(batch[:1]) == support(alone)


def test_b03_top_p_works_on_what_top_k_left_renormalised(ops):
    kept = ops["apply_top_k_top_p_npu"](logits_of(0.1, 0.2, 0.3, 0.4), k_of(2), p_of(0.5))
    torch.testing.assert_close(torch.softmax(kept, -1), torch.tensor([[0.0, 0.0, 0.0, 1.0]]))


def test_top_p_keeps_the_smallest_set_that_reaches_p(ops):
    logits = logits_of(0.5, 0.25, 0.125, 0.125).expand(5, 4).contiguous()
    kept = support(ops["apply_top_k_top_p_npu"](logits, None, p_of(0.01, 0.5, 0.51, 0.75, 0.76)))
    assert kept == [[0], [0], [0, 1], [0, 1], [0, 1, 2, 3]]  # the last two are tied


def test_rows_without_truncation_are_left_alone(ops):
    logits = torch.randn(4, 40)
    logits[1, 3] = -INF
    before = logits.clone()
    result = ops["apply_top_k_top_p_npu"](logits, k_of(0, 40, 5, 0), p_of(1.0, 1.0, 1.0, 0.5))
    assert torch.equal(result[:2], before[:2])
    assert torch.equal(ops["apply_top_k_top_p_npu"](before.clone(), None, None), before)
    assert len(support(result)[2]) == 5


def test_banned_tokens_stay_banned(ops):
    logits = torch.full((2, 30), -INF)
    logits[:, 4], logits[:, 9] = 1.0, 2.0
    assert support(ops["apply_top_k_top_p_npu"](logits, k_of(10, 10), p_of(0.99, 1.0))) == [[4, 9], [4, 9]]


@pytest.mark.parametrize("scale", [0.6, 3.0])  # most of the vocabulary stays, and some tokens
def test_the_cpu_gives_the_reference_no_whole_row(monkeypatch, scale):
    logits = random_logits(rows=4, vocab=40_000, scale=scale)
    k, p = k_of(5, 0, 50, 1), p_of(0.9, 0.9, 0.5, 0.1)
    expected = [
        reference.OPS[name](logits.clone(), *x)
        for name, x in (("apply_top_k_top_p_npu", (k, p)), ("apply_typical_p", (p,)))
    ]

    def refuse(x, *others):
        assert x.shape[1] < 1000
        return threshold(x, *others)

    threshold = reference.truncation.top_k_top_p_threshold
    monkeypatch.setattr(reference.truncation, "top_k_top_p_threshold", refuse)
    monkeypatch.setattr(reference.truncation, "apply_typical_p", refuse)
    assert torch.equal(cpu.OPS["apply_top_k_top_p_npu"](logits.clone(), k, p), expected[0])
    assert torch.equal(cpu.OPS["apply_typical_p"](logits.clone(), p), expected[1])


def test_min_p_is_a_share_of_the_largest_probability(ops):
    logits = logits_of(0.5, 0.24, 0.06, 0.2).expand(4, 4).contiguous()
    kept = support(ops["apply_min_p"](logits, p_of(0.0, 0.1, 0.45, 1.0)))
    assert kept == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1], [0]]


def test_min_p_of_one_keeps_all_that_are_tied_with_the_largest(ops):
    assert support(ops["apply_min_p"](torch.tensor([[2.0, 3.0, 3.0]]), p_of(1.0))) == [[1, 2]]


def test_top_n_sigma_counts_from_the_largest(ops):
    """Mean 5, population variance (16 + 4 + 1 + 1 + 0 + 0 + 4 + 16) / 8 = 5.25; sigma 2.2913."""
    row = torch.tensor([1.0, 3.0, 4.0, 6.0, 5.0, 5.0, 7.0, 9.0])
    kept = support(ops["apply_top_n_sigma"](row.expand(4, 8).contiguous(), p_of(0.0, 0.8, 0.9, 1.4)))
    assert kept == [[7], [7], [6, 7], [3, 6, 7]]


def test_top_n_sigma_keeps_what_lies_on_the_edge(ops):
    """Values -3 and 3: sigma is 3, so 3 - 2 * 3 is kept and 3 - 1.9 * 3 is not."""
    row = torch.tensor([-3.0, 3.0, -3.0, 3.0])
    assert support(ops["apply_top_n_sigma"](row.expand(2, 4).contiguous(), p_of(2.0, 1.9))) == [[0, 1, 2, 3], [1, 3]]


def test_top_n_sigma_leaves_banned_tokens_out_of_sigma(ops):
    banned = torch.tensor([[1.0, -INF, 3.0, 4.0, -INF, 6.0, 5.0, 5.0, 7.0, 9.0]])
    assert support(ops["apply_top_n_sigma"](banned, p_of(1.4))) == [[5, 8, 9]]


def test_top_n_sigma_does_not_depend_on_the_temperature(ops):
    """What the paper claims of it."""
    logits = random_logits()
    n = torch.full((8,), 1.3)
    cold, hot = (support(ops["apply_top_n_sigma"](logits * scale, n)) for scale in (2.0, 0.25))
    assert cold == hot


def test_typical_p_may_drop_the_likeliest_token(ops):
    """One token of 0.4 and six of 0.1: the entropy is 1.748 nats, surprises 0.916 and 2.303, so the six are closer."""
    probs = [0.4, *[0.1] * 6]
    entropy = -sum(x * math.log(x) for x in probs)
    assert abs(math.log(10) - entropy) < abs(math.log(2.5) - entropy)
    kept = support(ops["apply_typical_p"](logits_of(*probs).expand(3, 7).contiguous(), p_of(0.1, 0.59, 0.7)))
    assert kept == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6]]


def test_typical_p_keeps_those_equally_close_on_both_sides(ops):
    """One token of 1/2, two of 1/4: the entropy is 1.5 bits, and both surprises are half a bit away."""
    assert support(ops["apply_typical_p"](logits_of(0.5, 0.25, 0.25), p_of(0.2))) == [[0, 1, 2]]


def test_typical_p_of_one_is_off_and_a_sole_token_stays(ops):
    logits = torch.full((2, 20), -INF)
    logits[0] = torch.arange(20.0)
    logits[1, 3] = 2.0
    before = logits.clone()
    assert torch.equal(ops["apply_typical_p"](logits, p_of(1.0, 0.2)), before)


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_equal_to_transformers(ops, scale):
    """Its sums are float32 ones, so a token whose mass decides by less than their error may differ: not in these rows.
    Of tokens tied with the last one its top-p keeps some; there are no ties here."""
    logits = random_logits(scale=scale)
    for value in (0.05, 0.3, 0.8, 0.95):
        all_p, k = torch.full((8,), value), int(value * 100)
        for name, arguments, oracle in (
            ("apply_min_p", (all_p,), logits_process.MinPLogitsWarper(value)),
            ("apply_typical_p", (all_p,), logits_process.TypicalLogitsWarper(value)),
            ("apply_top_k_top_p_npu", (None, all_p), logits_process.TopPLogitsWarper(value)),
            ("apply_top_k_top_p_npu", (torch.full((8,), k), None), logits_process.TopKLogitsWarper(k)),
        ):
            assert torch.equal(ops[name](logits.clone(), *arguments), oracle(None, logits)), (name, value)
        both = logits_process.TopPLogitsWarper(value)(None, logits_process.TopKLogitsWarper(k)(None, logits))
        assert torch.equal(ops["apply_top_k_top_p_npu"](logits.clone(), torch.full((8,), k), all_p), both)


def test_top_p_keeps_ties_that_transformers_cuts(ops):
    """Four equal tokens and p = 0.4: two of them have the mass; which two would be the sort's choice."""
    logits = torch.zeros(1, 4)
    assert len(support(logits_process.TopPLogitsWarper(0.4)(None, logits))[0]) == 2
    assert support(ops["apply_top_k_top_p_npu"](logits, None, p_of(0.4))) == [[0, 1, 2, 3]]
