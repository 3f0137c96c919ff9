"""Verification of single batches: greedy rows, placeholders, ragged rows, what is remembered and for how long."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from workerkit.components.rejection.synthetic import SyntheticRejection, SyntheticRejectionConfig
from workerkit.components.sampler import bans, penalties, truncation
from workerkit.components.sampler.torch_sampler import TorchSampler, TorchSamplerConfig
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.request import NewRequest
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling import RandomStream
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.interfaces.speculation import Drafts

V, K, ROWS = 10, 3, 6
BOTH = pytest.mark.parametrize("method", ["standard", "block"])
INF = float("inf")


@pytest.fixture
def make(new_ops, new_rejection):
    """A verifier, and a sampler with requests in its slots: `params` of each."""

    def build(method, *params, kernels=None):
        kernels = kernels or new_ops()
        shape = WorkerShape(
            max_model_len=64, max_num_reqs=ROWS, max_num_batched_tokens=64, vocab_size=V, num_speculative_tokens=K
        )
        context = DeviceContext(device=torch.device("cpu"), dtype=torch.float32)
        stages = (
            bans.AllowedTokenIds(shape, context), bans.BadWords(shape, context, kernels),
            penalties.Penalties(shape, context, kernels), truncation.Temperature(shape, context, kernels),
            truncation.TopKTopP(shape, context, kernels),
        )  # fmt: skip
        sampler = TorchSampler(TorchSamplerConfig(), shape, context, kernels, stages)
        part = new_rejection(method, V, K, ROWS, kernels)
        for slot, given in enumerate(params):
            admit(part, sampler, slot, **given)
        return part, sampler

    return build


def admit(part, sampler, slot, **params):
    request = NewRequest(
        req_id=str(slot), token_ids=(1, 2, 3, 4, 5, 6), prompt_len=4, block_ids=((1,),),
        sampling=SamplingParams(**{"seed": 7 + slot, **params}),
    )  # fmt: skip
    part.add(slot, request)
    sampler.add(slot, request)


def results(output):
    return [ids[:count] for ids, count in zip(output.token_ids.tolist(), output.num_sampled.tolist(), strict=True)]


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 1.5


def batch_of(new_batch, *drafts, slots=None):
    """Requests whose newest token is 6, at position 5."""
    width = max(map(len, drafts)) + 1
    tokens = torch.tensor([[6, *ids, *[-1] * (width - 1 - len(ids))] for ids in drafts])
    return new_batch(torch.full((len(drafts),), 5), tokens, [len(ids) for ids in drafts], slots)


@BOTH
@pytest.mark.parametrize("drawn", [False, True])
def test_greedy_rows_are_exact(make, new_batch, method, drawn):
    """Drafts 0..K of which are right, whatever they were drawn from; the lowest id of several."""
    part, sampler = make(method, *[{"temperature": 0.0}] * 4)
    logits = randn(4 * (K + 1), V).round()  # ties
    best = [row.index(max(row)) for row in logits.tolist()]
    drafts = [best[4 * row : 4 * row + K] for row in range(4)]
    for row in range(K):
        drafts[row][row] = (drafts[row][row] + 1) % V
    batch = batch_of(new_batch, *drafts)
    if drawn:
        part.remember(batch, Drafts(token_ids=torch.tensor(drafts), logits=randn(4, K, V, seed=1)))
    output = part.verify(sampler.process(logits, batch), batch, sampler)
    assert results(output) == [best[4 * row : 4 * row + row + 1] for row in range(4)]
    assert output.num_rejected.tolist() == [3, 2, 1, 0]
    assert (output.num_sampled.dtype, output.num_rejected.dtype) == (torch.int32, torch.int32)


def test_certain_drafts_give_plain_samplings_tokens(make, new_batch):
    """Standard without draft logits: token for token what is drawn without drafts, right drafts or wrong ones."""
    part, sampler = make("standard", *[{"temperature": 1.3, "top_k": 7}] * ROWS)
    logits = randn(ROWS * (K + 1), V)
    guess = randn(ROWS, K, V, seed=2).argmax(-1).tolist()
    batch = batch_of(new_batch, *guess)
    plain = sampler.draw(sampler.process(logits.clone(), batch), batch).view(ROWS, -1).tolist()
    for share in range(K + 1):  # that many drafts are right
        batch = batch_of(new_batch, *[p[:share] + g[share:] for p, g in zip(plain, guess, strict=True)])
        output = part.verify(sampler.process(logits.clone(), batch), batch, sampler)
        for tokens, right in zip(results(output), plain, strict=True):
            assert tokens == right[: len(tokens)]
            assert len(tokens) > share


@BOTH
def test_the_target_as_its_own_draft_is_always_accepted(make, new_batch, method):
    part, sampler = make(method, *[{"temperature": 1.0}] * ROWS)
    for seed in range(20):
        logits = randn(ROWS, K + 1, V, seed=seed)
        drafts = torch.distributions.Categorical(logits=logits[:, :K]).sample()
        batch = batch_of(new_batch, *drafts.tolist())
        part.remember(batch, Drafts(token_ids=drafts, logits=logits[:, :K].clone()))
        output = part.verify(logits.flatten(0, 1), batch, sampler)
        assert output.num_rejected.sum() == 0


@BOTH
@pytest.mark.parametrize("drawn", [False, True])
def test_placeholders_are_never_accepted(make, new_batch, method, drawn):
    """Behind them nothing is accepted either; the row's own token is then a plain draw."""
    part, sampler = make(method, *[{"temperature": 1.0}] * 3)
    logits = torch.full((12, V), -INF)
    logits[:, 3] = 0.0  # nothing but 3 is possible, so all real drafts are accepted
    batch = batch_of(new_batch, [-1, -1, -1], [3, -1, 3], [3, 3, -1])
    if drawn:
        tokens = torch.full((3, 3), 3)
        part.remember(batch, Drafts(token_ids=tokens, logits=torch.zeros(3, 3, V)))
    output = part.verify(logits, batch, sampler)
    assert results(output) == [[3], [3, 3], [3, 3, 3]]
    assert output.num_rejected.tolist() == [3, 2, 1]
    flat = torch.zeros(4, V)
    alone = batch_of(new_batch, [-1, -1, -1])
    if drawn:
        part.remember(alone, Drafts(token_ids=torch.zeros(1, 3, dtype=torch.int64), logits=torch.zeros(1, 3, V)))
    assert results(part.verify(flat, alone, sampler)) == [sampler.draw(flat, alone).tolist()[:1]]


@BOTH
@pytest.mark.parametrize("drawn", [False, True])
def test_a_request_does_not_depend_on_the_batch(make, new_batch, method, drawn):
    """Ragged rows, requests without drafts, drafts with and without logits, in any order; B118, B140: and the same on
    two instances."""
    params = [{"temperature": t} for t in (1.0, 0.0, 0.8, 1.2, 1.0, 1.0)]
    drafts = [[1, 2, 3], [4, 5], [], [6], [7, 8, 9], [2, 2, -1]]
    logits = [randn(len(ids) + 1, V, seed=row) for row, ids in enumerate(drafts)]
    draft_logits = randn(ROWS, K, V, seed=9)

    def run(part, sampler, rows):
        for row in rows:
            own = batch_of(new_batch, [0, 0, 0], slots=[row])
            given = draft_logits[row : row + 1] if drawn and row % 2 == 0 else None
            part.remember(own, Drafts(token_ids=torch.zeros(1, K, dtype=torch.int64), logits=given))
        batch = batch_of(new_batch, *(drafts[row] for row in rows), slots=rows)
        output = part.verify(torch.cat([logits[row] for row in rows]), batch, sampler)
        return dict(zip(rows, results(output), strict=True))

    part, sampler = make(method, *params)
    whole = run(part, sampler, [0, 1, 2, 3, 4, 5])
    assert run(part, sampler, [5, 3, 1, 0, 2, 4]) == whole
    assert run(*make(method, *params), [4, 2, 0, 5, 1, 3]) == whole
    for row in (0, 1, 3, 4, 5):
        assert run(part, sampler, [row]) == {row: whole[row]}
    plain = sampler.draw(logits[2], batch_of(new_batch, [], slots=[2])).tolist()
    assert whole[2] == plain, "a request without drafts draws as it always does"


@BOTH
@pytest.mark.parametrize("why", ["verified", "added", "cleared", "replaced"])
def test_stale_distributions_are_not_used(make, new_batch, method, why):
    """As if nothing had ever been remembered; one that was used would have draft 0 rejected."""
    drafts = torch.tensor([[0, 0, 0]])
    far = torch.full((1, K, V), -INF)
    far[..., 1] = 0.0
    logits = torch.full((K + 1, V), -INF)
    logits[:, 0] = 0.0
    part, sampler = make(method, {"temperature": 1.0})
    batch = batch_of(new_batch, [0, 0, 0])
    part.remember(batch, Drafts(token_ids=drafts, logits=far))
    assert results(part.verify(logits, batch, sampler)) == [[0]], "what was never proposed is not accepted"
    part.remember(batch, Drafts(token_ids=drafts, logits=far))
    if why == "verified":
        part.verify(logits, batch, sampler)
    if why == "added":
        admit(part, sampler, 0, temperature=1.0)
    if why == "cleared":
        part.clear(0)
    if why == "replaced":
        part.remember(batch, Drafts(token_ids=drafts))
    assert results(part.verify(logits, batch, sampler)) == [[0, 0, 0, 0]]


@BOTH
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("impossible", [-INF, INF, float("nan")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b117_a_row_without_a_possible_token_ends_what_the_request_yields(
    make, new_batch, method, drawn, impossible, temperature
):
    part, sampler = make(method, *[{"temperature": temperature}] * 2)
    logits = torch.full((2, K + 1, V), -INF)
    logits[..., 3] = 0.0
    logits[0, 1], logits[1, 3] = impossible, impossible
    batch = batch_of(new_batch, [3, 3, 3], [3, 3, 3])
    if drawn:
        part.remember(batch, Drafts(token_ids=torch.full((2, 3), 3), logits=torch.zeros(2, 3, V)))
    output = part.verify(logits.flatten(0, 1), batch, sampler)
    assert results(output) == [[3, -1], [3, 3, 3, -1]]
    assert output.num_rejected.tolist() == [2, 0]


@BOTH
@pytest.mark.parametrize("drawn", [False, True])
def test_b115_every_stage_applies_to_every_verified_row(make, new_batch, method, drawn):
    """Target log([.5, .3, .2]), top_k = 1, the draft is 1 and was certain: rejected always, 0 comes out. A drafted 7 is
    penalised in the rows behind it. Banned tokens and bad words that end in a draft are not accepted."""
    banned = {"allowed_token_ids": (0, 2), "temperature": 1.0}
    words = {"bad_words_token_ids": ((1, 1),), "temperature": 1.0}
    part, sampler = make(method, {"top_k": 1, "temperature": 1.0}, {"frequency_penalty": 2.0, "temperature": 0.0},
                         banned, words)  # fmt: skip
    certain = torch.full((4, K, V), -INF)
    drafts = torch.tensor([[1, 1, 1], [7, 7, 7], [1, 1, 1], [1, 1, 1]])
    certain.scatter_(2, drafts[..., None], 0.0)
    logits = torch.full((4, K + 1, V), -INF)
    logits[..., :3] = torch.tensor([0.5, 0.3, 0.2]).log()
    logits[1, :, :] = -INF
    logits[1, :, 7], logits[1, :, 8] = 3.0, 0.0  # after two drafted 7s the 8 wins: 3 - 2 * 2 < 0
    logits[3, :, 1] = 100.0
    for seed in range(30):
        for slot, given in enumerate(({"top_k": 1, "temperature": 1.0}, None, banned, words)):
            if given:
                admit(part, sampler, slot, **given, seed=seed)
        batch = batch_of(new_batch, *drafts.tolist())
        if drawn:
            part.remember(batch, Drafts(token_ids=drafts, logits=certain.clone()))
        processed = sampler.process(logits.flatten(0, 1).clone(), batch)
        first, second, third, fourth = results(part.verify(processed, batch, sampler))
        assert first == [0]
        assert second == [7, 7, 8]
        assert third in ([0], [2])
        assert fourth in ([1, 0], [1, 2])


@BOTH
def test_distributions_that_are_no_numbers_reject_their_drafts(make, new_batch, method):
    """A draft network that breaks costs speed, not output: what comes out is drawn from the target."""
    part, sampler = make(method, {"temperature": 1.0})
    batch = batch_of(new_batch, [3, 3, 3])
    part.remember(batch, Drafts(token_ids=torch.full((1, 3), 3), logits=torch.full((1, 3, V), torch.nan)))
    logits = torch.full((4, V), -INF)
    logits[:, 3] = 0.0
    assert results(part.verify(logits, batch, sampler)) == [[3]]


@BOTH
def test_a_residual_without_mass_falls_back_to_the_target(make, new_batch, new_ops, method):
    """p and q are the same, and the draft is rejected all the same, as rounding may have it."""

    def almost_one(seeds, positions, stream):
        return torch.full(seeds.shape, 2.0 if stream == RandomStream.ACCEPTANCE else 0.5, dtype=torch.float64)

    part, sampler = make(method, {"temperature": 1.0}, kernels=new_ops(uniform_from_seed=almost_one))
    logits = torch.full((4, V), -INF)
    logits[:, 4] = 0.0
    batch = batch_of(new_batch, [4, 4, 4])
    part.remember(batch, Drafts(token_ids=torch.full((1, 3), 4), logits=logits[None, :3].clone()))
    assert results(part.verify(logits, batch, sampler)) == [[4]]


@BOTH
def test_fewer_drafts_than_remembered(make, new_batch, method):
    """The scheduler, or a budget, may cut the tail: the others are judged as before."""
    part, sampler = make(method, {"temperature": 1.0})
    logits, drafts = randn(K + 1, V), torch.tensor([[1, 2, 3]])
    kept = Drafts(token_ids=drafts, logits=randn(1, K, V, seed=1))
    cut, trimmed = batch_of(new_batch, [1, 2]), batch_of(new_batch, [1, 2, -1])
    part.remember(cut, kept)
    one = part.verify(logits[:K], cut, sampler)
    part.remember(cut, kept)
    other = part.verify(logits, trimmed, sampler)
    assert one.num_sampled.tolist() == other.num_sampled.tolist()
    assert other.num_rejected.tolist() == [one.num_rejected[0] + 1]
    accepted = int(one.num_sampled) - 1
    assert results(one)[0][:accepted] == results(other)[0][:accepted]


class NoSync(TorchDispatchMode):
    """Fails where torch would have to wait for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"), name
        return func(*args, **(kwargs or {}))


@BOTH
def test_nothing_waits_for_the_device(make, new_batch, method):
    part, sampler = make(method, *[{"temperature": t} for t in (1.0, 0.0, 1.0)])
    batch = batch_of(new_batch, [1, 2, 3], [4], [5, -1])
    logits = randn(9, V - 1)
    logits = torch.nn.functional.pad(logits[: batch.num_logits], (0, 1))
    one = batch_of(new_batch, [1, 2, 3], slots=[0])
    with NoSync():
        part.remember(batch, Drafts(token_ids=torch.zeros(3, K, dtype=torch.int64), logits=torch.zeros(3, K, V)))
        part.remember(one, Drafts(token_ids=torch.zeros(1, K, dtype=torch.int64)))
        part.verify(logits, batch, sampler)
        part.verify(logits, batch, sampler)


def test_numbers_are_drawn_from_the_streams_they_belong_to(make, new_batch, new_ops):
    """Standard with certain drafts draws once a row; drawn drafts use streams of their own."""
    seen = set()

    def watched(seeds, positions, stream):
        seen.add(RandomStream(stream))
        return new_ops().uniform_from_seed(seeds, positions, stream)

    part, sampler = make("standard", {"temperature": 1.0}, kernels=new_ops(uniform_from_seed=watched))
    batch = batch_of(new_batch, [1, 2, 3])
    part.verify(randn(4, V), batch, sampler)
    assert seen == {RandomStream.SAMPLING}
    seen.clear()
    part.remember(batch, Drafts(token_ids=torch.tensor([[1, 2, 3]]), logits=torch.zeros(1, K, V)))
    part.verify(randn(4, V), batch, sampler)
    assert {RandomStream.ACCEPTANCE, RandomStream.RESIDUAL, RandomStream.BONUS} <= seen


@BOTH
def test_distributions_are_kept_from_the_first_one_on(make, new_batch, method):
    part, _ = make(method, {"temperature": 1.0})
    batch = batch_of(new_batch, [1, 2, 3])
    part.remember(batch, Drafts(token_ids=torch.tensor([[1, 2, 3]])))
    assert part._drafts._probs is None
    part.remember(batch, Drafts(token_ids=torch.tensor([[1, 2]]), logits=torch.zeros(1, 2, V)))
    assert part._drafts._probs.shape == (ROWS, K, V)


# Synthetic


def synthetic(new_ops, rates, rows=20_000):
    shape = WorkerShape(
        max_model_len=64, max_num_reqs=rows, max_num_batched_tokens=64, vocab_size=V, num_speculative_tokens=K
    )
    context = DeviceContext(device=torch.device("cpu"), dtype=torch.float32)
    ops = new_ops()
    sampler = TorchSampler(TorchSamplerConfig(), shape, context, ops, (truncation.Temperature(shape, context, ops),))
    part = SyntheticRejection(SyntheticRejectionConfig(rates=rates), shape, context, ops)
    sampler._seeds += torch.arange(rows)
    return part, sampler


@pytest.mark.parametrize("rates", [(0.8, 0.5, 0.1), (0.6,), (1.0, 1.0, 1.0), (0.5, 0.0, 0.0), ()])
def test_synthetic_accepts_at_the_given_rates(new_batch, new_ops, rates):
    rows = 20_000
    part, sampler = synthetic(new_ops, rates, rows)
    batch = new_batch(torch.full((rows,), 5), torch.tensor([[6, 1, 2, 3]]).repeat(rows, 1))
    logits = torch.zeros(rows * 4, V)
    logits[:, 9] = 1.0
    output = part.verify(logits, batch, sampler)
    for place, rate in enumerate((*rates, *[0.0] * (K - len(rates)))):
        assert (output.num_sampled > place + 1).float().mean().item() == pytest.approx(rate, abs=0.015)
    assert all(ids == [*[1, 2, 3][: len(ids) - 1], 9] for ids in results(output)[:50]), "the last one is the target's"


def test_synthetic_never_accepts_placeholders_or_drafts_of_impossible_rows(new_batch, new_ops):
    part, sampler = synthetic(new_ops, (1.0, 1.0, 1.0), ROWS)
    batch = batch_of(new_batch, [1, -1, 3], [1, 2, 3])
    logits = torch.zeros(8, V)
    logits[6] = -INF
    output = part.verify(logits, batch, sampler)
    assert results(output) == [[1, 0], [1, 2, -1]]


@pytest.mark.parametrize("rates", [(0.5, 0.6), (1.1,), (-0.1,)])
def test_synthetic_refuses_rates_that_are_none(rates):
    with pytest.raises(ValueError, match="rates"):
        SyntheticRejectionConfig(rates=rates)
