"""Every sampling op: the CPU's form against the reference on random inputs, and rows against the same rows alone."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_inputs import INF, arguments, rows_of_logits

from workerkit.kernels import cpu, reference
from workerkit.kernels.cpu import nearest, truncation

LIBRARIES = {"reference": reference.OPS, "cpu": cpu.OPS}
IN_PLACE = (
    "apply_penalties",
    "apply_bad_words",
    "apply_min_p",
    "apply_top_n_sigma",
    "apply_top_k_top_p_npu",
    "apply_typical_p",
    "apply_grammar_bitmask",
)


@pytest.mark.parametrize("name", IN_PLACE)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_cpu_equals_reference_bit_for_bit(name, data):
    """The module constants decide which way a row goes: varied, so that small vocabularies go all of them."""
    logits, generator = data.draw(rows_of_logits())
    others = arguments(name, *logits.shape, generator)
    expected = reference.OPS[name](logits.clone(), *others)
    count, few = data.draw(st.sampled_from([1, 4, 16, 512])), data.draw(st.sampled_from([-1, 64]))
    with mock.patch.object(nearest, "_COUNT", count), mock.patch.object(truncation, "_FEW_BLOCKS", few):
        got = cpu.OPS[name](logits, *others)
    assert got is logits
    assert torch.equal(got, expected)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_cpu_logprobs_are_within_rounding_of_the_reference(data):
    logits, generator = data.draw(rows_of_logits())
    others = arguments("compute_token_logprobs", *logits.shape, generator)
    expected = reference.OPS["compute_token_logprobs"](logits, *others)
    torch.testing.assert_close(cpu.OPS["compute_token_logprobs"](logits, *others), expected, rtol=3e-7, atol=2e-6)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_cpu_finds_the_same_most_likely_tokens_as_the_reference(data):
    logits, _ = data.draw(rows_of_logits())
    count = data.draw(st.integers(0, min(logits.shape[1], 50)))
    expected = reference.OPS["most_likely_tokens"](logits, count)
    assert torch.equal(cpu.OPS["most_likely_tokens"](logits, count), expected)


@settings(deadline=None, max_examples=60)
@given(
    seeds=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20),
    position=st.integers(0, 2**40),
    stream=st.integers(0, 5),
)
def test_cpu_hashes_to_the_same_bits_as_the_reference(seeds, position, stream):
    numbers = torch.tensor(seeds), torch.arange(position, position + len(seeds)), stream
    assert torch.equal(cpu.OPS["uniform_from_seed"](*numbers), reference.OPS["uniform_from_seed"](*numbers))


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("name", ["apply_min_p", "apply_top_n_sigma", "apply_top_k_top_p_npu", "apply_typical_p"])
def test_cpu_equals_reference_on_a_large_vocabulary(name, scale):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50_001, generator=generator) * scale
    second = torch.tensor([0.5, 0.9, 0.95, 0.99, 0.1, 1.0])
    others = (None, second) if name == "apply_top_k_top_p_npu" else (second,)
    expected = reference.OPS[name](logits.clone(), *others)
    assert torch.equal(cpu.OPS[name](logits, *others), expected)


@pytest.mark.parametrize("name", [*IN_PLACE, "compute_token_logprobs"])
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("vocab", [130, 40_003])  # the second is long enough for one row to be shared by threads
def test_a_row_does_not_depend_on_its_batch(library, name, vocab):
    generator = torch.Generator().manual_seed(5)
    rows = 33
    logits = torch.randn(rows, vocab, generator=generator) * 3
    logits[torch.rand(logits.shape, generator=generator) < 0.01] = -INF
    others = arguments(name, rows, vocab, generator)
    if name == "apply_grammar_bitmask":  # the mask of each row in turn
        others = (torch.arange(rows), others[1][:1].expand(rows, -1).contiguous())
    whole = LIBRARIES[library][name](logits.clone(), *others)
    for row in (0, 7, 31, 32):
        alone = [None if x is None else x[row : row + 1] for x in others]
        if name == "apply_grammar_bitmask":
            alone[0] = torch.zeros(1, dtype=torch.long)
        assert torch.equal(LIBRARIES[library][name](logits[row : row + 1].clone(), *alone)[0], whole[row])


@pytest.mark.parametrize("vocab", [130, 40_003])
def test_a_draw_does_not_depend_on_its_batch(vocab):
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(33, vocab, generator=generator) * 3
    uniform = torch.rand(33, generator=generator, dtype=torch.float64)
    probs = logits.softmax(-1)
    whole = reference.OPS["sample_from_probs"](probs, uniform)
    for row in range(33):
        alone = logits[row : row + 1].softmax(-1)  # softmax is part of the draw
        assert torch.equal(alone[0], probs[row])
        assert reference.OPS["sample_from_probs"](alone, uniform[row : row + 1]) == whole[row]


@pytest.mark.parametrize("name", [name for name in IN_PLACE if name != "apply_penalties"])
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("value", [-INF, INF, float("nan")])
def test_a_row_without_a_distribution_harms_no_other(library, name, value):
    """The sampler ends the request of such a row; here it must neither raise nor change the row beside it."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 1000, generator=generator) * 3
    others = arguments(name, 2, 1000, generator)
    if name == "apply_grammar_bitmask":
        others = (torch.arange(2), others[1][:1].expand(2, -1).contiguous())
    expected = LIBRARIES[library][name](logits.clone(), *others)[1]
    logits[0] = value
    if value == INF:
        logits[0, 5:] = 1.0
    got = LIBRARIES[library][name](logits, *others)
    assert torch.equal(got[1], expected)
    assert not bool((got[0].isfinite() & (got[0] != 1.0)).any())


@pytest.mark.parametrize("rows", [1, 33])
def test_argmax_takes_the_lowest_id_of_those_tied(rows):
    """What greedy decoding relies on: ties in the parts of different threads, and of different vector lanes."""
    logits = torch.zeros(rows, 200_000)
    for tied in ([199_999, 100_001, 7], [150_000, 149_999], [64, 63], [33, 17, 16], list(range(200_000))):
        logits.zero_()
        logits[:, tied] = 1.0
        assert logits.argmax(-1).tolist() == [min(tied)] * rows


# --- the order of the most likely


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.sampled_from([-INF, -1.0, -0.0, 0.0, 0.5, 2.0]), min_size=7, max_size=7), min_size=1, max_size=4
    ),
    count=st.integers(0, 7),
)
def test_equally_likely_tokens_come_in_the_order_of_their_ids(rows, count):
    """So the first n of a longer list are the list of n, and no other request's wish changes a row."""
    expected = [sorted(range(7), key=lambda i: (-row[i], i))[:count] for row in rows]
    for ops in LIBRARIES.values():
        assert ops["most_likely_tokens"](torch.tensor(rows), count).tolist() == expected
