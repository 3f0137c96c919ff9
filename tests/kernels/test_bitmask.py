"""The layout of a grammar's bitmask, and log-probabilities of chosen tokens; in both libraries."""

import math

import pytest
import torch

from workerkit.kernels import cpu, reference

INF = float("inf")


@pytest.fixture(params=["reference", "cpu"])
def ops(request):
    return {"reference": reference, "cpu": cpu}[request.param].OPS


def int32(bits):
    """An unsigned word as the int32 with the same bits."""
    return bits - 2**32 if bits >= 2**31 else bits


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 100])
def test_bit_i_mod_32_of_word_i_div_32_is_token_i(ops, vocab):
    words = -(-vocab // 32)
    bitmask = torch.zeros(vocab, words, dtype=torch.int32)
    for token in range(vocab):  # row i allows token i alone; bit 31 makes a negative number
        bitmask[token, token // 32] = int32(1 << (token % 32))
    logits = torch.randn(vocab, vocab)
    got = ops["apply_grammar_bitmask"](logits.clone(), torch.arange(vocab), bitmask)
    assert torch.equal(got, logits.where(torch.eye(vocab, dtype=torch.bool), -INF))


def test_bits_past_the_vocabulary_mean_nothing(ops):
    bitmask = torch.tensor([[int32(0b1010), -1]], dtype=torch.int32)
    got = ops["apply_grammar_bitmask"](torch.zeros(1, 33), torch.tensor([0]), bitmask)
    assert got.isfinite().nonzero()[:, 1].tolist() == [1, 3, 32]


def test_only_the_rows_named_are_masked_each_by_its_own_mask(ops):
    logits = torch.randn(5, 40)
    bitmask = torch.tensor([[1, 0], [0, 1]], dtype=torch.int32)
    got = ops["apply_grammar_bitmask"](logits.clone(), torch.tensor([3, 1]), bitmask)
    assert torch.equal(got[[0, 2, 4]], logits[[0, 2, 4]])
    assert [row.isfinite().nonzero().flatten().tolist() for row in got[[3, 1]]] == [[0], [32]]
    nothing = ops["apply_grammar_bitmask"](
        logits.clone(), torch.empty(0, dtype=torch.long), torch.empty(0, 2, dtype=torch.int32)
    )
    assert torch.equal(nothing, logits)


def test_allowed_logits_keep_their_bits(ops):
    logits = torch.tensor([[-0.0, 0.0, -INF, INF, 1e-45]])
    got = ops["apply_grammar_bitmask"](logits.clone(), torch.tensor([0]), torch.tensor([[-1]], dtype=torch.int32))
    assert torch.equal(got.view(torch.int32), logits.view(torch.int32))


def test_logprobs_of_chosen_tokens(ops):
    logits = torch.tensor([[0.0, math.log(3.0), -INF, 0.0], [5.0, 5.0, 5.0, 5.0]])
    got = ops["compute_token_logprobs"](logits, torch.tensor([[1, 2, 1], [0, 3, 1]]))
    torch.testing.assert_close(got, torch.tensor([[math.log(0.6), -INF, math.log(0.6)], [-math.log(4.0)] * 3]))


def test_logprobs_of_a_row_without_any_token_are_minus_infinity(ops):
    got = ops["compute_token_logprobs"](torch.full((1, 4), -INF), torch.tensor([[0, 3]]))
    assert got.tolist() == [[-INF, -INF]]


@pytest.mark.parametrize("scale", [0.1, 5.0, 300.0])
def test_logprobs_are_exact_to_float32(ops, scale):
    """Against float64, with a vocabulary long enough for errors to add up, and logits that overflow if not shifted."""
    logits = torch.randn(9, 150_001, generator=torch.Generator().manual_seed(0)) * scale
    chosen = torch.arange(9 * 20).view(9, 20)
    expected = logits.double().log_softmax(-1).gather(1, chosen)
    got = ops["compute_token_logprobs"](logits, chosen).double()
    assert ((got - expected).abs() <= 1e-6 + expected.abs() * 2**-24).all()
    assert not logits.isnan().any()


def test_logprobs_of_no_rows(ops):
    assert ops["compute_token_logprobs"](torch.empty(0, 10), torch.empty(0, 3, dtype=torch.long)).shape == (0, 3)
