"""Each stage against a few lines of numpy, alone and in any batch; and the faults that others had."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling_oracle import process as oracle

from workerkit.framework.errors import RequestError
from workerkit.framework.interfaces.sampling_params import SamplingParams

INF = float("inf")
VOCAB = 16
OFF = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "top_n_sigma": 0.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip
GREEDY = {**OFF, "temperature": 0.0}


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


def banned(row):
    return torch.isinf(row).nonzero().flatten().tolist()


ids = st.integers(0, VOCAB - 1)
PARAMETERS = {
    "allowed_token_ids": {"allowed_token_ids": st.lists(ids, min_size=1, max_size=20).map(tuple)},
    "logit_bias": {"logit_bias": st.dictionaries(ids, st.floats(-5, 5, width=32), min_size=1)},
    "min_tokens": {"min_tokens": st.integers(1, 5)},
    "penalties": {
        "presence_penalty": st.floats(-2, 2, width=16),
        "frequency_penalty": st.floats(-2, 2, width=16),
        "repetition_penalty": st.floats(0.5, 2, width=16),
    },
    "bad_words": {
        "bad_words_token_ids": st.lists(
            st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=4
        ).map(tuple)
    },
    "temperature": {"temperature": st.sampled_from([0.25, 0.7, 1.5, 4.0])},
    "top_n_sigma": {"top_n_sigma": st.sampled_from([0.3, 1.0, 1.7])},
    "min_p": {"min_p": st.sampled_from([0.05, 0.3, 1.0])},
    "top_k_top_p": {"top_k": st.integers(0, VOCAB + 1), "top_p": st.sampled_from([0.2, 0.55, 0.9, 1.0])},
    "typical_p": {"typical_p": st.sampled_from([0.2, 0.55, 0.9])},
}


@st.composite
def request_using(draw, names):
    """Parameters that use some of the stages."""
    params = dict(draw(st.sampled_from([OFF, OFF, GREEDY])))
    for name in names:
        values = {key: draw(strategy) for key, strategy in PARAMETERS[name].items()}
        if params["temperature"] or "temperature" not in values:
            params.update(values)
    prompt = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    output = draw(st.lists(st.integers(0, 3), max_size=5))
    drafts = draw(st.lists(st.integers(0, 3), max_size=3))
    stop_ids = draw(st.sets(st.integers(0, 5), max_size=2))
    return {"params": params, "prompt": prompt, "output": output, "drafts": drafts, "stop_ids": stop_ids}


def expected(logits, row):
    """Rows after the output and after each draft."""
    params = SamplingParams(**row["params"])
    results = []
    for have in range(len(row["drafts"]) + 1):
        output = [*row["output"], *row["drafts"][:have]]
        results.append(oracle(logits[have].numpy(), params, row["prompt"], output, row["stop_ids"]))
    return torch.from_numpy(np.stack(results)).float()


def check_mixed_batch(new_bench, library, rows, seed):
    """Rows in slots that were used before, in a batch of others: as the oracle says, and the same bits as alone."""
    bench = new_bench(library=library)
    slots = list(range(len(rows)))[::-1]
    for slot, row in zip(slots, rows[::-1], strict=True):  # whoever had the slot before
        bench.admit(slot, row["prompt"], row["output"], row["stop_ids"], **row["params"])
    for slot, row in zip(slots, rows, strict=True):
        bench.drop(slot)
        bench.admit(slot, row["prompt"], row["output"], row["stop_ids"], **row["params"])
    counts = [len(row["drafts"]) + 1 for row in rows]
    logits = randn(sum(counts), VOCAB, seed=seed)
    batch = bench.decode(*((slot, row["drafts"]) for slot, row in zip(slots, rows, strict=True)))
    whole = torch.split(bench.process(logits, batch), counts)
    for slot, row, got, given_ in zip(slots, rows, whole, torch.split(logits, counts), strict=True):
        torch.testing.assert_close(got, expected(given_, row), atol=1e-4, rtol=1e-4)
        assert torch.equal(bench.process(given_, bench.decode((slot, row["drafts"]))), got)
        fresh = new_bench(library=library)
        fresh.admit(7, row["prompt"], row["output"], row["stop_ids"], **row["params"])
        assert torch.equal(fresh.process(given_, fresh.decode((7, row["drafts"]))), got)


settled = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("library", ["reference", "cpu"])
@pytest.mark.parametrize("name", PARAMETERS)
@settled
@given(data=st.data())
def test_a_stage_in_random_mixed_batches(new_bench, library, name, data):
    rows = data.draw(st.lists(st.one_of(request_using([name]), request_using([])), min_size=1, max_size=4))
    check_mixed_batch(new_bench, library, rows, data.draw(st.integers(0, 1000)))


@pytest.mark.parametrize("library", ["reference", "cpu"])
@settled
@given(data=st.data())
def test_all_stages_in_random_mixed_batches(new_bench, library, data):
    some = st.sets(st.sampled_from(sorted(PARAMETERS))).flatmap(lambda names: request_using(sorted(names)))
    rows = data.draw(st.lists(some, min_size=1, max_size=5))
    check_mixed_batch(new_bench, library, rows, data.draw(st.integers(0, 1000)))


def test_greedy_requests_use_no_truncation_and_keep_their_argmax(bench):
    bench.admit(0, temperature=0.0, top_k=3, top_p=0.2, min_p=0.9, typical_p=0.1, top_n_sigma=0.1)
    logits = randn(1, VOCAB)
    assert torch.equal(bench.process(logits, bench.decode(0)), logits)


# --- min_tokens


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
def test_b04_min_tokens_frees_the_end_exactly_then(bench, min_tokens):
    """N tokens that do not end it, then the one that does: N + 1 in all."""
    bench.admit(0, (1, 2, 3), stop_ids=(5, 9), temperature=0.0, min_tokens=min_tokens, logit_bias={5: 100.0, 9: 90.0})
    tokens = []
    while not tokens or tokens[-1] not in (5, 9):
        batch = bench.decode(0)
        tokens += bench.draw(randn(1, VOCAB, seed=len(tokens)), batch).tolist()
        bench.commit(batch, tokens[-1:])
    assert len(tokens) == min_tokens + 1
    assert tokens[-1] == 5


def test_b04_rows_of_drafts_count_their_drafts(bench):
    bench.admit(0, (1, 2), (3,), stop_ids=(5,), temperature=0.0, min_tokens=3)
    rows = bench.process(randn(4, VOCAB), bench.decode((0, (6, 7, 8))))
    assert [banned(row) for row in rows] == [[5], [5], [], []]


def test_b07_where_only_the_end_is_possible_min_tokens_gives_way(bench):
    """A complete grammar allows the end alone; so may allowed_token_ids. Other rows keep the ban."""
    bench.admit(0, stop_ids=(5, 9), temperature=0.0, min_tokens=4)
    bench.admit(1, stop_ids=(5, 9), temperature=1.0, min_tokens=4, allowed_token_ids=(9,))
    bench.admit(2, stop_ids=(5,), temperature=0.0, min_tokens=4)
    logits = randn(3, VOCAB)
    logits[0] = -INF
    logits[0, 5] = -3.0  # what a grammar's bitmask leaves
    batch = bench.decode(0, 1, 2)
    rows = bench.process(logits, batch)
    assert rows[0, 5] == -3.0
    assert banned(rows[1]) == [token for token in range(VOCAB) if token != 9]
    assert banned(rows[2]) == [5]
    assert bench.draw(logits, batch).tolist()[:2] == [5, 9]


def test_min_tokens_without_any_id_that_ends_bans_nothing(bench):
    bench.admit(0, temperature=0.0, min_tokens=4)
    bench.admit(1, stop_ids=(5,), temperature=0.0, min_tokens=4)
    logits = randn(2, VOCAB)
    rows = bench.process(logits, bench.decode(0, 1))
    assert torch.equal(rows[0], logits[0])
    assert banned(rows[1]) == [5]


# --- ids


def test_b10_ids_outside_the_models_vocabulary_are_refused_by_name(new_bench):
    """The bound is the model's, added tokens included; a request that runs is not disturbed."""
    bench = new_bench(vocab=103)
    bench.admit(0, temperature=0.0, logit_bias={102: 50.0})
    bench.sampler.check(SamplingParams(logit_bias={102: 5.0}))
    for field, value in (
        ("logit_bias", {191222: -100.0}),
        ("allowed_token_ids", (1, 191222)),
        ("bad_words_token_ids", ((1,), (2, 191222))),
        ("logprob_token_ids", (191222,)),
        ("stop_token_ids", (191222,)),
    ):
        with pytest.raises(RequestError, match=f"{field}: token id 191222 .* 0 to 102"):
            bench.sampler.check(SamplingParams(**{field: value}))
    assert bench.draw(randn(1, 103), bench.decode(0)).tolist() == [102]


def test_b110_a_slot_does_not_inherit_the_limits_of_the_request_before(bench):
    """Rows [A, B(allowed 5)]; A finishes, and C without limits takes its slot, then B's."""
    bench.admit(0, temperature=0.0)
    bench.admit(1, temperature=0.0, allowed_token_ids=(5,))
    logits = randn(2, VOCAB)
    bench.drop(0)
    bench.admit(0, temperature=0.0)
    rows = bench.process(logits, bench.decode(1, 0))
    assert banned(rows[0]) == [token for token in range(VOCAB) if token != 5]
    assert torch.equal(rows[1], logits[1])
    bench.admit(1, temperature=0.0)  # without a `clear` before
    assert torch.equal(bench.process(logits, bench.decode(1, 0)), logits)


# --- penalties


def test_b11_repetition_counts_the_prompt_and_the_others_the_output(new_bench):
    bench = new_bench(vocab=5)
    bench.admit(
        0, (1, 1, 2), (3, 3), temperature=0.0, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25
    )
    rows = bench.process(torch.tensor([[1.0, 2.0, -2.0, 4.0, 5.0]]), bench.decode(0))
    assert rows.tolist() == [[1.0, 1.0, -4.0, 0.75, 5.0]]


def test_b115_drafts_are_penalised_as_output(bench):
    """Row 1 of drafts [7, 7] has seen one 7, row 2 two of them."""
    bench.admit(0, (1,), (2,), temperature=0.0, frequency_penalty=0.5)
    bench.admit(1, temperature=0.0)
    rows = bench.process(torch.ones(4, VOCAB), bench.decode((0, (7, 7)), 1))
    assert rows[:, 7].tolist() == [1.0, 0.5, 0.0, 1.0]
    assert rows[:, 2].tolist() == [0.5, 0.5, 0.5, 1.0]


def test_b134_penalties_read_the_tokens_of_the_step_before(new_bench):
    """No placeholder is ever read: the step before has committed on the same stream. Rows [A plain, B repetition 2]."""
    bench = new_bench(vocab=8)
    bench.admit(0, (0,), (3,), temperature=0.0)
    bench.admit(1, (0,), (4,), temperature=0.0, repetition_penalty=2.0)
    batch = bench.decode(0, 1)
    bench.commit(batch, [5], [6])
    rows = bench.process(torch.ones(2, 8), bench.decode(0, 1))
    assert rows[0].tolist() == [1.0] * 8
    assert rows[1].tolist() == [0.5, 1.0, 1.0, 1.0, 0.5, 1.0, 0.5, 1.0]


def test_b134_a_token_of_minus_one_is_no_token(new_bench):
    bench = new_bench(vocab=8)
    bench.admit(0, (0,), (), temperature=0.0, repetition_penalty=2.0, presence_penalty=0.25)
    batch = bench.decode(0)
    bench.commit(batch, [-1])
    (row,) = bench.process(torch.ones(1, 8), bench.decode(0))
    assert row.tolist() == [0.5, *[1.0] * 7]


# --- bad words


def test_b24_bad_words_hit_the_rows_of_their_request(bench):
    bench.admit(0, temperature=0.0)
    bench.admit(1, temperature=0.0, bad_words_token_ids=((9,),))
    rows = bench.process(randn(6, VOCAB), bench.decode((0, (3, 4)), (1, (3, 4))))
    assert [banned(row) for row in rows] == [[], [], [], [9], [9], [9]]


@pytest.mark.parametrize(("last", "drafts", "row"), [(4, (5, 1), 1), (5, (1, 2), 0)])
def test_b25_bad_words_may_begin_in_the_drafts_or_before_them(bench, last, drafts, row):
    bench.admit(0, (5,), (1, last), temperature=0.0, bad_words_token_ids=((5, 6),))
    rows = bench.process(randn(3, VOCAB), bench.decode((0, drafts)))
    assert [banned(logits) for logits in rows] == [[6] if number == row else [] for number in range(3)]


def test_prompt_tokens_begin_no_bad_word(bench):
    bench.admit(0, (4, 5), (), temperature=0.0, bad_words_token_ids=((5, 6),))
    bench.admit(1, (4, 5), (5,), temperature=0.0, bad_words_token_ids=((5, 6), (5, 5, 5, 7)))
    rows = bench.process(randn(2, VOCAB), bench.decode(0, 1))
    assert [banned(row) for row in rows] == [[], [6]]


def test_b113_resumed_and_chunked_requests_know_what_they_generated(bench):
    """The second output token may not be a 7 after a 3: plainly, after three chunks, and after a preemption."""
    params = {"temperature": 0.0, "bad_words_token_ids": ((3, 7),), "frequency_penalty": 1.0}
    logits = randn(1, VOCAB)
    bench.admit(0, (1, 2, 9), **params, computed=0)
    for _ in range(3):
        batch = bench.batch([(0, ())], [1])
        if batch.plan.is_partial[0]:
            assert torch.equal(bench.process(logits, batch), logits)  # it will be thrown away: no stage is asked
            bench.commit(batch, [])
    bench.commit(batch, [3])
    plain = bench.process(logits, bench.decode(0))
    bench.drop(0)
    bench.admit(5, (1, 2, 9), (3,), **params)  # resumed in another slot
    assert banned(plain[0]) == [7]
    assert plain[0, 3] == logits[0, 3] - 1
    assert torch.equal(bench.process(logits, bench.decode(5)), plain)


# --- truncation and the verifier


def test_b115_drafts_are_verified_against_the_processed_distribution(new_bench):
    """top_k 1 leaves token 0 alone, so a draft of 1 is always rejected; alone or among other requests."""
    from workerkit.framework.testing.fakes_sampling import FakeRejection

    bench = new_bench(vocab=3)
    bench.admit(0, temperature=1.0, top_k=1, seed=5)
    bench.admit(1, temperature=0.0)
    logits = torch.tensor([0.5, 0.3, 0.2]).log()[None]
    for _ in range(20):
        batch = bench.decode((0, (1,)), 1)
        output = FakeRejection().verify(bench.process(logits.expand(3, 3), batch), batch, bench.sampler)
        assert (int(output.token_ids[0, 0]), output.num_rejected.tolist()) == (0, [1, 0])
        bench.commit(batch, [0], [0])
