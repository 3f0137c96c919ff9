"""Truncation, the seeded hash and the inverse CDF, in both libraries."""

import math

import pytest
import torch

from workerkit.kernels import cpu, reference

TOP_K_TOP_P = {"reference": reference.OPS["apply_top_k_top_p"], "cpu": cpu.OPS["apply_top_k_top_p"]}
uniform_from_seed = reference.OPS["uniform_from_seed"]
sample_from_probs = reference.OPS["sample_from_probs"]


@pytest.fixture(params=TOP_K_TOP_P)
def apply_top_k_top_p(request):
    return TOP_K_TOP_P[request.param]


def support(logits):
    return [row.isfinite().nonzero().flatten().tolist() for row in logits]


def k_of(*values):
    return torch.tensor(values, dtype=torch.int32)


def p_of(*values):
    return torch.tensor(values, dtype=torch.float32)


def test_b01_ties_at_k_are_kept_whatever_the_batch_size(apply_top_k_top_p):
    row = torch.tensor([1.0, 2.0, 2.0, 2.0, 3.0])
    alone = apply_top_k_top_p(row[None], k_of(3), None)
    batch = apply_top_k_top_p(torch.cat((row[None], torch.randn(8, 5))), k_of(3, *[2] * 8), None)
    assert support(alone) == [[1, 2, 3, 4]]
    assert support(batch[:1]) == support(alone)


def test_b03_top_p_works_on_what_top_k_left_renormalised(apply_top_k_top_p):
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    probs = torch.softmax(apply_top_k_top_p(logits, k_of(2), p_of(0.5)), -1)
    torch.testing.assert_close(probs, torch.tensor([[0.0, 0.0, 0.0, 1.0]]))


def test_top_p_keeps_the_smallest_set_that_reaches_p(apply_top_k_top_p):
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(5, 4).contiguous()
    kept = support(apply_top_k_top_p(logits, None, p_of(0.0, 0.5, 0.51, 0.75, 0.76)))
    assert kept == [[0], [0], [0, 1], [0, 1], [0, 1, 2, 3]]  # the last two are tied


def test_rows_without_truncation_are_left_alone(apply_top_k_top_p):
    logits = torch.randn(4, 40)
    logits[1, 3] = float("-inf")
    result = apply_top_k_top_p(logits, k_of(0, 40, 5, 0), p_of(1.0, 1.0, 1.0, 0.5))
    assert torch.equal(result[:2], logits[:2])
    assert torch.equal(apply_top_k_top_p(logits, None, None), logits)
    assert len(support(result)[2]) == 5


def test_banned_tokens_stay_banned(apply_top_k_top_p):
    logits = torch.full((2, 30), float("-inf"))
    logits[:, 4], logits[:, 9] = 1.0, 2.0
    assert support(apply_top_k_top_p(logits, k_of(10, 10), p_of(0.99, 1.0))) == [[4, 9], [4, 9]]


@pytest.mark.parametrize("levels", [7, 10_000_000])  # many ties, and hardly any
def test_cpu_equals_reference_exactly(levels):
    generator = torch.Generator().manual_seed(0)
    for rows, vocab in ((1, 5000), (9, 5000), (3, 40)):
        for _ in range(8):
            logits = torch.randint(levels, (rows, vocab), generator=generator).float() * (12 / levels)
            k = torch.randint(0, 60, (rows,), generator=generator)
            p = torch.where(k > 0, torch.rand(rows, generator=generator), 1.0)
            for arguments in ((k, p), (k, None), (None, p), (torch.zeros_like(k), p)):
                got = cpu.OPS["apply_top_k_top_p"](logits, *arguments)
                assert torch.equal(got, reference.OPS["apply_top_k_top_p"](logits, *arguments))


def test_cpu_needs_no_sort_where_top_k_is_small(monkeypatch):
    def refuse(*_):
        raise AssertionError("the whole vocabulary was sorted")

    logits = torch.randn(4, 1000)
    expected = reference.OPS["apply_top_k_top_p"](logits, k_of(5, 0, 50, 1), p_of(0.9, 1.0, 0.5, 0.1))
    monkeypatch.setattr(torch.Tensor, "sort", refuse)
    assert torch.equal(cpu.OPS["apply_top_k_top_p"](logits, k_of(5, 0, 50, 1), p_of(0.9, 1.0, 0.5, 0.1)), expected)


def test_a_row_does_not_depend_on_its_batch(apply_top_k_top_p):
    logits = torch.randn(33, 2000)
    k, p = torch.randint(1, 100, (33,)), torch.rand(33)
    whole = apply_top_k_top_p(logits, k, p)
    for row in range(33):
        assert torch.equal(apply_top_k_top_p(logits[row : row + 1], k[row : row + 1], p[row : row + 1])[0], whole[row])


def test_splitmix64_against_python_integers():
    def mix(x):
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    assert mix(0) == 0xE220A8397B1DCDAF  # the generator's published first output for seed 0
    for seed, position, stream in ((0, 0, 0), (42, 7, 0), (2**63 - 1, 10**6, 3), (-5, 1, 1)):
        expected = (mix(mix(mix(seed % 2**64) ^ position) ^ stream) >> 12) + 0.5
        got = uniform_from_seed(torch.tensor([seed]), torch.tensor([position]), stream)
        assert got.item() == expected / 2**52


@pytest.mark.parametrize("axis", ["seed", "position", "stream"])
def test_uniform_is_uniform_and_uncorrelated_along(axis):
    n = 100_000
    count = torch.arange(n)
    zero = torch.zeros_like(count)
    if axis == "stream":
        u = torch.cat([uniform_from_seed(count[:1000], zero[:1000] + 5, stream) for stream in range(100)])
    else:
        u = uniform_from_seed(count, zero + 3, 0) if axis == "seed" else uniform_from_seed(zero + 3, count, 0)
    assert u.dtype == torch.float64
    assert 0 < u.min() < u.max() < 1
    counts = torch.histc(u, 100, 0, 1)
    chi2 = ((counts - n / 100) ** 2 / (n / 100)).sum()
    assert abs(chi2 - 99) < 5 * math.sqrt(2 * 99)
    centred = u - 0.5
    for lag in (1, 2, 1000):
        correlation = (centred[lag:] * centred[:-lag]).mean() * 12
        assert abs(correlation) < 5 / math.sqrt(n)
    bits = (u * 2**20).long()
    for bit in range(20):
        assert abs(((bits >> bit) & 1).double().mean() - 0.5) < 5 * 0.5 / math.sqrt(n)


def test_uniform_depends_on_its_own_row_only():
    seeds, positions = torch.arange(50) * 977, torch.arange(50) % 7
    whole = uniform_from_seed(seeds, positions, 0)
    assert torch.equal(uniform_from_seed(seeds[17:18], positions[17:18], 0), whole[17:18])
    assert len(set(whole.tolist())) == 50
    swapped = uniform_from_seed(torch.tensor([3, 5]), torch.tensor([5, 3]), 0)
    assert swapped[0] != swapped[1]


def test_samples_follow_the_distribution():
    probs = torch.tensor([0.0, 1.0, 0.0, 2.0, 5.0, 0.0])  # not normalised
    n = 200_000
    uniform = uniform_from_seed(torch.arange(n), torch.zeros(n, dtype=torch.long), 0)
    counts = torch.bincount(sample_from_probs(probs.expand(n, 6), uniform), minlength=6)
    assert counts[[0, 2, 5]].sum() == 0
    expected = probs / probs.sum() * n
    assert (((counts - expected) ** 2)[expected > 0] / expected[expected > 0]).sum() < 25


def test_the_ends_of_the_interval_never_give_an_impossible_token():
    probs = torch.rand(64, 1000)
    probs[:, :7] = 0.0
    probs[:, -9:] = 0.0
    for value in (2.0**-53, 1 - 2.0**-53, 0.5):
        token = sample_from_probs(probs, torch.full((64,), value, dtype=torch.float64))
        assert (probs.gather(1, token[:, None]) > 0).all()


def test_b117_rows_without_a_distribution_give_an_id_below_the_vocabulary():
    rows = torch.stack((torch.zeros(10), torch.full((10,), float("nan"))))
    token = sample_from_probs(rows, torch.tensor([0.3, 0.9], dtype=torch.float64))
    assert ((token >= 0) & (token < 10)).all()
