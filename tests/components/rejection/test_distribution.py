"""What comes out is distributed like the target: 2 * 10^5 texts each, and worlds that are wrong on purpose."""

import numpy as np
import pytest
import torch

from workerkit.framework.interfaces.sampling import DrawKeys, RandomStream
from workerkit.framework.interfaces.speculation import Drafts
from workerkit.kernels import cpu

LIMIT, FAR = 4.0, 20.0  # standard deviations of chi-square
PLAIN = {"temperature": 1.0}
PROCESSED = {
    "temperature": 0.8, "top_k": 6, "top_p": 0.93, "frequency_penalty": 0.4, "presence_penalty": 0.2,
    "repetition_penalty": 1.2,
}  # fmt: skip
uniform = cpu.OPS["uniform_from_seed"]


def tables(vocab, seed, noise):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(vocab, vocab, generator=generator) * 1.2
    return target, target + torch.randn(vocab, vocab, generator=generator) * noise


@pytest.mark.parametrize("params", [PLAIN, PROCESSED], ids=["plain", "processed"])
@pytest.mark.parametrize("one_hot", [False, True], ids=["drawn", "one_hot"])
def test_two_tokens_follow_the_target(new_world, distance, params, one_hot):
    """Both methods; temperature, top-k, top-p and penalties of drafted tokens; a temperature that is 5 % off shows."""
    mean = {}
    for method in ("standard", "block"):
        world = new_world(method, *tables(8, 0, 0.8), one_hot=one_hot, **params)
        texts, mean[method] = world.generate(2, 50)
        exact = world.exact(2)
        assert len(texts) == 200_000
        assert distance(texts[:, :1], exact.sum(1)) < LIMIT
        assert distance(texts, exact) < LIMIT
        assert distance(texts, world.exact(2, temperature=params["temperature"] * 1.05)) > FAR
    error = 3 / np.sqrt(len(texts))
    if one_hot:
        assert mean["block"] > mean["standard"] - error, "the same in theory"
    else:
        assert mean["block"] > mean["standard"] + 0.05


def shared(seeds, positions, stream):
    """The fault of the reference system: a draft is replaced by means of the number that rejected it."""
    return uniform(seeds, positions, RandomStream.ACCEPTANCE if stream == RandomStream.RESIDUAL else stream)


@pytest.mark.parametrize(("method", "num_drafts"), [("standard", 3), ("block", 1)])
def test_a_shared_number_for_acceptance_and_residual_shows(new_world, new_ops, distance, method, num_drafts):
    world = new_world(method, *tables(8, 0, 0.8), num_drafts, kernels=new_ops(uniform_from_seed=shared))
    texts, _ = world.generate(2, 20)
    assert distance(texts, world.exact(2)) > FAR


@pytest.mark.parametrize("method", ["standard", "block"])
def test_the_numbers_of_the_reference(new_world, new_ops, distance, method):
    """p = [.4, .1, .2, .3], q = [.1, .6, .2, .1]: right is p, the shared draw gives [.36, .10, .20, .339]."""
    p, q = (torch.tensor([row] * 4).log() for row in ([0.4, 0.1, 0.2, 0.3], [0.1, 0.6, 0.2, 0.1]))
    texts, accepted = new_world(method, p, q, num_drafts=1).generate(1, 50)
    assert distance(texts, np.array([0.4, 0.1, 0.2, 0.3])) < LIMIT
    assert accepted == pytest.approx(0.5, abs=0.005)  # the sum of min(p, q)
    wrong = new_world(method, p, q, num_drafts=1, kernels=new_ops(uniform_from_seed=shared))
    texts, _ = wrong.generate(1, 50)
    assert np.bincount(texts[:, 0]) / len(texts) == pytest.approx([0.36, 0.10, 0.20, 0.34], abs=0.005)
    assert distance(texts, np.array([0.4, 0.1, 0.2, 0.3])) > FAR


def test_the_numbers_of_the_reference_for_a_certain_draft(new_world, new_ops, distance):
    """p = [.5, .25, .25], the draft is 0: the shared draw gives [.5, 0, .5]. Standard draws once, so shares nothing."""
    p, q = (torch.tensor([row] * 4).log() for row in ([0.5, 0.25, 0.25, 0.0], [0.8, 0.1, 0.1, 0.0]))
    right = np.array([0.5, 0.25, 0.25, 0.0])
    for method in ("standard", "block"):
        texts, _ = new_world(method, p, q, num_drafts=1, one_hot=True).generate(1, 50)
        assert distance(texts, right) < LIMIT
    wrong = new_world("block", p, q, num_drafts=1, one_hot=True, kernels=new_ops(uniform_from_seed=shared))
    texts, _ = wrong.generate(1, 50)
    assert np.bincount(texts[:, 0]) / len(texts) == pytest.approx([0.5, 0.0, 0.5], abs=0.005)
    assert distance(texts, right) > FAR


def by_position(seeds, positions, stream):
    """A block's acceptance keyed by position alone."""
    return uniform(seeds, (positions & 0xFFFFFFFF) + (positions >> 32), stream)


def four_tokens(new_world, distance, repeats=50, **given):
    """The largest distance of the first 2, 3 and 4 tokens."""
    world = new_world("block", *tables(4, 3, 1.5), **given)
    texts, _ = world.generate(4, repeats)
    exact = world.exact(4)
    return max(distance(texts[:, :length], exact.sum(tuple(range(length, 4)))) for length in (2, 3, 4))


@pytest.mark.parametrize("one_hot", [False, True], ids=["drawn", "one_hot"])
def test_later_blocks_follow_the_target_too(new_world, distance, one_hot):
    """A block leaves drafts and numbers behind that it has selected among; the next one, for some of the same
    positions, must not use them again."""
    assert four_tokens(new_world, distance, one_hot=one_hot) < LIMIT


def test_keys_by_position_alone_show(new_world, new_ops, distance):
    """Either fault: acceptances, or drafts, that are drawn with the numbers of the block before."""
    assert four_tokens(new_world, distance, repeats=5, kernels=new_ops(uniform_from_seed=by_position)) > FAR
    assert four_tokens(new_world, distance, repeats=10, draft_keys=lambda first, number: first + number) > FAR


@pytest.mark.parametrize("vocab", [2, 3])
def test_b41_a_chain_of_two_over_all_draws(new_batch, new_ops, new_rejection, vocab):
    """Every pair of drafts, u_1 and u_2 on a grid; what replaces a draft is taken as the distribution it is drawn from.

    The joint distribution is the target's, up to the grid, and no fewer drafts are accepted than one by one.
    """
    generator = torch.Generator().manual_seed(vocab)
    target, draft = (torch.randn(1 + vocab, vocab, generator=generator).softmax(-1) for _ in range(2))
    grid = 200
    first, second, u1, u2 = (
        axis.flatten() for axis in torch.meshgrid(*(torch.arange(n) for n in (vocab, vocab, grid, grid)), indexing="ij")
    )
    weight = (draft[0][first] * draft[1 + first, second]).double() / grid**2
    tokens = torch.stack([torch.zeros_like(first), first, second], 1)
    joint, accepted = {}, {}
    for method in ("standard", "block"):
        drawn_from = []

        def on_the_grid(seeds, positions, stream):
            if stream != RandomStream.ACCEPTANCE:
                return torch.zeros_like(seeds, dtype=torch.float64)
            return (torch.stack([u1, u2], 1).flatten() + 0.5) / grid

        def record(probs, uniform, drawn_from=drawn_from):
            drawn_from.append(probs.double() / probs.double().sum(-1, keepdim=True))
            return probs.argmax(-1)

        kernels = new_ops(uniform_from_seed=on_the_grid, sample_from_probs=record)
        part, sampler = new_rejection(method, vocab, 2, len(first), kernels), FixedKeys(len(first))
        batch = new_batch(torch.full_like(first, 5), tokens)
        rows = torch.stack([draft[0].expand(len(first), -1), draft[1 + first]], 1)
        part.remember(batch, Drafts(token_ids=tokens[:, 1:], logits=rows.log()))
        logits = torch.stack([target[0].expand(len(first), -1), target[1 + first], target[1 + second]], 1)
        output = part.verify(logits.flatten(0, 1).log(), batch, sampler)
        length = output.num_sampled - 1
        accepted[method] = (weight * length).sum().item()
        chances = (drawn_from[0] * weight[:, None]).double()
        result = torch.zeros(vocab, vocab, dtype=torch.float64)
        result.index_put_((first[length == 2], second[length == 2]), weight[length == 2], accumulate=True)
        replaced = torch.zeros(vocab, vocab, dtype=torch.float64)
        replaced.index_add_(0, first[length == 1], chances[length == 1])
        single = chances[length == 0].sum(0)  # the token after it is the target's own
        joint[method] = result + replaced + single[:, None] * target[1:].double()
    exact = (target[0][:, None] * target[1:]).double()
    for method in joint:
        assert (joint[method] - exact).abs().max() < 1 / grid
    assert accepted["block"] > accepted["standard"] + 2 / grid


class FixedKeys:
    """As much of a sampler as a verifier asks for when all drafts were drawn from something."""

    def __init__(self, rows):
        self.rows = rows

    def keys(self, batch):
        return DrawKeys(seeds=torch.zeros(self.rows, dtype=torch.int64), temperatures=torch.ones(self.rows))
