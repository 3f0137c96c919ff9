"""The sampler: distributions, seeds, independence of the batch."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.interfaces.request import NewRequest, SamplingParams

VOCAB = 16


@pytest.fixture
def sampler():
    config = {
        "model": {"source": "random", "max_model_len": 64},
        "limits": {"max_num_reqs": 16},
        "components": {"loader": {"use": "random", "vocab_size": VOCAB}},
    }
    return assemble(config).get(roles.SAMPLER)


def admit(sampler, slot, **params):
    request = NewRequest(
        req_id=str(slot), token_ids=(1,), prompt_len=1, sampling=SamplingParams(**params), block_ids=((1,),)
    )
    sampler.add(slot, request)


def batch(slots, positions):
    rows = torch.arange(len(slots))
    return SimpleNamespace(
        idx_mapping=torch.tensor(slots),
        positions=torch.tensor(positions),
        logits_indices=rows,
        logits_rows=rows,
        plan=SimpleNamespace(slots=np.array(slots)),
    )


def draw(sampler, logits, slots, positions):
    now = batch(slots, positions)
    return sampler.draw(sampler.process(logits.clone(), now), now)


@pytest.mark.parametrize(
    "params",
    [{"temperature": 1.0}, {"temperature": 0.5}, {"top_k": 4, "temperature": 1.3}, {"top_p": 0.7, "temperature": 1.0}],
)
def test_draws_follow_the_distribution(sampler, params):
    """Chi-square of 20,000 positions against the exact distribution; the 99.99 % quantile at 15 degrees is 44.3."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(VOCAB, generator=generator) * 1.5
    admit(sampler, 0, seed=11, **params)
    expected = (logits / params["temperature"]).softmax(-1)
    order = expected.argsort(descending=True)
    keep = torch.zeros(VOCAB, dtype=torch.bool)
    if "top_k" in params:
        keep[order[: params["top_k"]]] = True
    elif "top_p" in params:
        mass = expected[order].cumsum(0)
        keep[order[: int((mass < params["top_p"]).sum()) + 1]] = True
    else:
        keep[:] = True
    expected = torch.where(keep, expected, 0.0)
    expected /= expected.sum()
    count = 20_000
    slots = [0] * count
    drawn = draw(sampler, logits.expand(count, VOCAB), slots, list(range(count)))
    seen = torch.bincount(drawn, minlength=VOCAB).double()
    assert seen[~keep].sum() == 0
    chi_square = ((seen - count * expected) ** 2 / (count * expected).clamp(min=1e-12))[keep].sum()
    assert chi_square < 44.3


def test_b15_a_seeded_row_draws_the_same_alone_and_in_any_batch(sampler):
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    admit(sampler, 4, seed=42, temperature=0.8)
    admit(sampler, 2, temperature=0.8)
    admit(sampler, 9, temperature=0.0)
    positions = list(range(50))
    alone = [draw(sampler, logits[:1], [4], [p])[0] for p in positions]
    mixed = [draw(sampler, logits[[1, 0, 2]], [2, 4, 9], [0, p, 5]) for p in positions]
    assert [int(row[1]) for row in mixed] == [int(token) for token in alone]
    assert all(int(row[2]) == int(logits[2].argmax()) for row in mixed)
    assert len({int(token) for token in alone}) > 3


def test_b16_the_slot_and_the_order_do_not_matter(sampler):
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2))
    for slots in ((0, 1), (7, 3)):
        admit(sampler, slots[0], seed=1, temperature=1.0)
        admit(sampler, slots[1], seed=2, temperature=1.0)
        forward = draw(sampler, logits, list(slots), [8, 9])
        backward = draw(sampler, logits.flip(0), list(slots[::-1]), [9, 8])
        assert forward.tolist() == backward.flip(0).tolist()


def test_unseeded_requests_do_not_repeat_each_other(sampler):
    logits = torch.zeros(1, VOCAB)
    for slot in (0, 1):
        admit(sampler, slot, temperature=1.0)
    streams = [[int(draw(sampler, logits, [slot], [p])[0]) for p in range(40)] for slot in (0, 1)]
    assert streams[0] != streams[1]


def test_a_cleared_slot_is_greedy_and_untruncated_again(sampler):
    admit(sampler, 0, seed=3, temperature=2.0, top_k=2, top_p=0.5)
    sampler.clear(0)
    logits = torch.randn(1, VOCAB)
    now = batch([0], [5])
    assert torch.equal(sampler.process(logits.clone(), now), logits)
    assert int(sampler.draw(logits, now)[0]) == int(logits.argmax())


def test_the_config_fills_in_what_a_request_leaves_unset():
    config = {
        "model": {"source": "random", "max_model_len": 64},
        "components": {"loader": {"use": "random", "vocab_size": VOCAB}, "sampler": {"top_k": 1, "temperature": 1.0}},
    }
    sampler = assemble(config).get(roles.SAMPLER)
    logits = torch.randn(1, VOCAB)
    admit(sampler, 0, seed=1)
    assert {int(draw(sampler, logits, [0], [p])[0]) for p in range(30)} == {int(logits.argmax())}
    admit(sampler, 0, seed=1, top_k=0)  # 0 is a choice, not "unset"
    assert len({int(draw(sampler, logits, [0], [p])[0]) for p in range(30)}) > 1
    admit(sampler, 0, seed=1, temperature=0.0, top_k=0)
    assert {int(draw(sampler, logits, [0], [p])[0]) for p in range(30)} == {int(logits.argmax())}
