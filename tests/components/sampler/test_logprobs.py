"""Log-probabilities: whose, of which tokens, across drafts and chunks."""

import numpy as np
import pytest
import torch

from workerkit.framework.interfaces.sampling import SamplerOutput
from workerkit.framework.testing.fakes_sampling import FakeRejection

VOCAB = 16


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


def sample(bench, logits, batch, sampled=None):
    """A whole step over logits that it may change -> (SamplerOutput, LogprobsTensors)."""
    logits = logits.clone()
    raw = bench.sampler.raw(logits, batch)
    logits = bench.sampler.process(logits, batch)
    if sampled is None:
        if batch.num_logits > batch.num_reqs:
            sampled = FakeRejection().verify(logits, batch, bench.sampler)
        else:
            counts = torch.from_numpy((~batch.plan.is_partial).astype(np.int32))
            drawn = bench.sampler.draw(logits, batch)[:, None]
            sampled = SamplerOutput(token_ids=drawn, num_sampled=counts, num_rejected=counts * 0)
    return sampled, bench.sampler.logprobs(raw, logits, batch, sampled)


def by_request(tensors):
    """Request -> (ids, logprobs, ranks) with its own columns only."""
    result = {}
    for span in tensors.spans:
        rows = slice(span.start, span.start + span.count)
        columns = [*range(1 + span.num_top), *range(1 + tensors.top, 1 + tensors.top + span.num_chosen)]
        ids, values = tensors.token_ids[rows][:, columns], tensors.logprobs[rows][:, columns]
        result[span.req_id] = ids.tolist(), values, tensors.ranks[rows].tolist()
    return result


def right_ids(row, token, top, chosen=()):
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    return [token, *order[:top], *chosen]


def test_only_requests_that_ask_get_any_and_each_what_it_asked(bench):
    bench.admit(0, temperature=0.0)
    bench.admit(1, temperature=0.0, logprobs=0)
    bench.admit(2, temperature=0.7, seed=1, logprobs=3, logprob_token_ids=(9, 2), allowed_token_ids=(4, 5, 6))
    bench.admit(3, temperature=0.0, logprobs=-1)
    bench.admit(4, temperature=0.0, logprob_token_ids=(7,))
    logits = randn(5, VOCAB)
    sampled, tensors = sample(bench, logits, bench.decode(0, 1, 2, 3, 4))
    found = by_request(tensors)
    assert [*found] == ["r1", "r2", "r3", "r4"]
    right = logits.log_softmax(-1)
    for row, top, chosen in ((1, 0, ()), (2, 3, (9, 2)), (3, VOCAB, ()), (4, 0, (7,))):
        (ids,), (values,), (rank,) = found[f"r{row}"]
        token = int(sampled.token_ids[row, 0])
        assert ids == right_ids(logits[row].tolist(), token, top, chosen)
        torch.testing.assert_close(values, right[row, ids])
        assert rank == 1 + int((logits[row] > logits[row, token]).sum())
    assert sample(bench, logits[:1], bench.decode(0))[1] is None


def test_raw_are_the_models_own_and_processed_what_the_stages_made_of_them(new_bench):
    params = {"temperature": 0.5, "top_k": 3, "logit_bias": {2: 4.0}, "logprobs": 2, "seed": 4}
    logits = randn(1, VOCAB)
    results = {}
    for mode in ("raw", "processed"):
        bench = new_bench(logprobs=mode)
        bench.admit(0, **params)
        bench.admit(1)
        sampled, tensors = sample(bench, torch.cat((randn(1, VOCAB, seed=9), logits)), bench.decode(1, 0))
        (results[mode],) = by_request(tensors)["r0"][1]
        batch = bench.decode(0)
        expected = logits if mode == "raw" else bench.process(logits, batch)
        ids = right_ids(expected[0].tolist(), int(sampled.token_ids[1, 0]), 2)
        torch.testing.assert_close(results[mode], expected.log_softmax(-1)[0, ids])
    assert not torch.allclose(results["raw"], results["processed"])


def test_b53_discarded_rows_and_rejected_drafts_shift_nothing(bench):
    """A partial prefill, then a decode with 2 drafts of which 1 is accepted, then one without."""
    bench.admit(0, (1, 2, 3, 4), computed=0, logprobs=1, temperature=0.0)
    bench.admit(1, (1,), (2,), logprobs=2, temperature=0.0)
    bench.admit(2, (1,), (2,), logprobs=1, temperature=0.0)
    logits = randn(5, VOCAB)
    first, second = logits[1].argmax(), logits[2].argmax()
    batch = bench.batch([(0, ()), (1, (int(first), int(second) ^ 1)), (2, ())], [2, None, None])
    sampled, tensors = sample(bench, logits, batch)
    assert sampled.num_rejected.tolist() == [0, 1, 0]
    found = by_request(tensors)
    assert [*found] == ["r1", "r2"]
    ids, values, ranks = found["r1"]
    assert [row[0] for row in ids[:2]] == [int(first), int(second)]
    torch.testing.assert_close(values[:2, 0], logits.log_softmax(-1)[[1, 2], [first, second]])
    assert ranks[:2] == [1, 1]
    assert found["r2"][0][0] == right_ids(logits[4].tolist(), int(logits[4].argmax()), 1)


def test_a_row_without_a_token_disturbs_nobody(bench):
    bench.admit(0, temperature=0.0, logprobs=1)
    bench.admit(1, temperature=0.0, logprobs=1)
    logits = randn(2, VOCAB)
    logits[0] = torch.nan
    sampled, tensors = sample(bench, logits, bench.decode(0, 1))
    assert sampled.token_ids.flatten().tolist() == [-1, int(logits[1].argmax())]
    torch.testing.assert_close(by_request(tensors)["r1"][1][0, 0], logits[1].log_softmax(-1).max())


def test_a_slot_forgets_what_was_asked(bench):
    bench.admit(0, logprobs=3, prompt_logprobs=1, logprob_token_ids=(4,))
    bench.admit(0, logprobs=1)
    bench.admit(1, logprobs=1)
    bench.drop(1)
    bench.admit(1, (1, 2, 3), computed=0)
    batch = bench.batch([(0, ()), (1, ())], [None, 2])
    _, tensors = sample(bench, randn(2, VOCAB), batch)
    (span,) = tensors.spans
    assert (span.req_id, span.num_top, span.num_chosen) == ("r0", 1, 0)
    assert bench.sampler.prompt_logprobs(randn(batch.num_tokens_padded, 4), batch, lambda rows: rows) is None


# --- prompts


@pytest.mark.parametrize("budget", [10, 9, 5, 3, 1])
def test_b52_prompt_logprobs_do_not_depend_on_the_chunks(new_bench, budget):
    """Ten ids: nine entries, of each id given those before it, once; a neighbour's chunks change nothing."""
    bench = new_bench(rows=4)
    prompt = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)
    hidden, head = randn(10, 6, seed=1), randn(6, VOCAB, seed=2)
    bench.admit(2, prompt, computed=0, prompt_logprobs=2, temperature=0.0)
    bench.admit(1, (7, 7), (8,), computed=0, prompt_logprobs=-1)
    entries, calls = [], []

    def compute_logits(rows):
        calls.append(len(rows))
        return rows @ head

    while bench.live[2].computed < 10:
        start, chunk = bench.live[2].computed, min(budget, 10 - bench.live[2].computed)
        beside = bench.live[1].computed < 3
        batch = bench.batch([(1, ()), (2, ())], [1, chunk]) if beside else bench.batch([(2, ())], [chunk])
        states = torch.full((batch.num_tokens_padded, 6), torch.nan)
        states[beside : beside + chunk] = hidden[start : start + chunk]
        if beside:
            states[0] = 0.0
        tensors = bench.sampler.prompt_logprobs(states, batch, compute_logits)
        found = {} if tensors is None else by_request(tensors)
        assert ("r1" in found) == (bench.live[1].computed == 0)
        if "r2" in found:
            entries += zip(*found["r2"], strict=True)
        last = [[1]] if start + chunk == 10 else [[]]
        bench.commit(batch, *[[]] * beside, *last)
        if beside and bench.live[1].computed == 3:
            bench.live[1].computed = 2
    right = (hidden @ head).log_softmax(-1)
    assert len(entries) == 9
    for position, (ids, values, rank) in enumerate(entries):
        assert ids == right_ids(right[position].tolist(), prompt[position + 1], 2)
        torch.testing.assert_close(values, right[position, ids], atol=1e-5, rtol=1e-5)
        assert rank == 1 + int((right[position] > right[position, ids[0]]).sum())
    assert max(calls) <= 4, "bounded memory"


def test_prompt_logprobs_after_a_cached_prefix_or_a_preemption_are_those_of_the_prompt_only(bench):
    """Tokens generated before a preemption are no prompt, though they are prefilled again."""
    bench.admit(0, (1, 2, 3, 4), (5, 6), computed=2, prompt_logprobs=0)
    batch = bench.batch([(0, ())], [4])
    hidden = randn(batch.num_tokens_padded, VOCAB)
    tensors = bench.sampler.prompt_logprobs(hidden, batch, lambda rows: rows)
    ((ids, values, _),) = by_request(tensors).values()
    assert ids == [[4]]
    torch.testing.assert_close(values[0, 0], hidden[0].log_softmax(-1)[4])
