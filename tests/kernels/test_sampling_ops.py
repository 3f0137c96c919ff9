"""The seeded hash and the inverse CDF."""

import itertools
import math

import pytest
import torch

from workerkit.kernels import cpu, reference


@pytest.fixture(params=["reference", "cpu"])
def uniform_from_seed(request):
    return {"reference": reference, "cpu": cpu}[request.param].OPS["uniform_from_seed"]


sample_from_probs = reference.OPS["sample_from_probs"]


def test_splitmix64_against_python_integers(uniform_from_seed):
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
def test_uniform_is_uniform_and_uncorrelated_along(uniform_from_seed, axis):
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


def test_uniform_depends_on_its_own_row_only(uniform_from_seed):
    seeds, positions = torch.arange(50) * 977, torch.arange(50) % 7
    whole = uniform_from_seed(seeds, positions, 0)
    assert torch.equal(uniform_from_seed(seeds[17:18], positions[17:18], 0), whole[17:18])
    assert len(set(whole.tolist())) == 50
    swapped = uniform_from_seed(torch.tensor([3, 5]), torch.tensor([5, 3]), 0)
    assert swapped[0] != swapped[1]


def test_samples_follow_the_distribution(uniform_from_seed):
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


def test_a_draw_is_where_the_cdf_first_exceeds_the_number():
    """Against Python's own sums, over several blocks of the vocabulary and one that is not full."""
    generator = torch.Generator().manual_seed(0)
    probs = torch.randint(0, 4, (50, 391), generator=generator).float()  # sums are exact
    uniform = torch.rand(50, generator=generator, dtype=torch.float64)
    for row, number, token in zip(probs.tolist(), uniform.tolist(), sample_from_probs(probs, uniform), strict=True):
        cdf = itertools.accumulate(row)
        assert token == next(i for i, mass in enumerate(cdf) if mass > number * sum(row))


def test_a_number_at_an_edge_takes_the_token_behind_it():
    probs = torch.zeros(4, 300)
    probs[:, [5, 127, 128, 299]] = 1.0
    uniform = torch.tensor([0.0, 0.25, 0.5, 0.75], dtype=torch.float64)
    assert sample_from_probs(probs, uniform).tolist() == [5, 127, 128, 299]
