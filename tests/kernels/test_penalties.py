"""Penalties and bad words by hand, and against transformers; in both libraries."""

import pytest
import torch
from transformers.generation import logits_process

from workerkit.kernels import cpu, reference

INF = float("inf")


@pytest.fixture(params=["reference", "cpu"])
def ops(request):
    return {"reference": reference, "cpu": cpu}[request.param].OPS


def penalised(ops, logits, texts, prompt_lens, presence=0.0, frequency=0.0, repetition=1.0):
    width = max(map(len, texts))
    ids = torch.tensor([[*text, *[-1] * (width - len(text))] for text in texts], dtype=torch.long)
    numbers = [torch.full((len(texts),), value) for value in (presence, frequency, repetition)]
    return ops["apply_penalties"](torch.tensor(logits), ids, torch.tensor(prompt_lens), *numbers)


def test_b11_repetition_counts_the_prompt_and_the_others_do_not(ops):
    got = penalised(ops, [[1.0, 2.0, -2.0, 4.0, 5.0]], [[1, 1, 2, 3, 3]], [3], 0.25, 0.5, 2.0)
    assert got.tolist() == [[1.0, 1.0, -4.0, 0.75, 5.0]]


def test_a_token_of_prompt_and_output_gets_every_penalty_once(ops):
    got = penalised(ops, [[8.0, -1.0]], [[0, 1, 0, 0]], [2], 0.5, 0.25, 2.0)
    assert got.tolist() == [[8.0 / 2 - 2 * 0.25 - 0.5, -2.0]]


def test_unused_columns_and_empty_texts_change_nothing(ops):
    logits = [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    got = penalised(ops, logits, [[2], [], [1, 2]], [0, 0, 2], 1.0, 1.0, 4.0)
    assert got.tolist() == [[1.0, 2.0, 3.0 / 4 - 2.0], [1.0, 2.0, 3.0], [1.0, 0.5, 0.75]]
    assert penalised(ops, logits, [[], [], []], [0, 0, 0], 1.0, 1.0, 4.0).tolist() == logits


def test_banned_tokens_stay_banned(ops):
    got = penalised(ops, [[-INF, 1.0]], [[0, 0, 1]], [1], -2.0, -2.0, 0.5)
    assert got.tolist() == [[-INF, 1.0 / 0.5 + 2.0 + 2.0]]


def test_repetition_equals_transformers(ops):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 300, generator=generator) * 5
    ids = torch.randint(60, (7, 50), generator=generator)
    for value in (0.7, 1.3):
        expected = logits_process.RepetitionPenaltyLogitsProcessor(value)(ids, logits.clone())
        zero = torch.zeros(7)
        got = ops["apply_penalties"](logits.clone(), ids, torch.full((7,), 20), zero, zero, torch.full((7,), value))
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def words_of(*rows):
    """Bad words of each row -> the three tensors of the op."""
    columns = [
        [(token, number, len(word) - 1 - i) for number, word in enumerate(words) for i, token in enumerate(word)]
        for words in rows
    ]
    width = max(map(len, columns))
    padded = [row + [(-1, -1, -1)] * (width - len(row)) for row in columns]
    return torch.tensor(padded, dtype=torch.long).view(len(rows), width, 3).unbind(2)


def banned(ops, recent, *rows):
    got = ops["apply_bad_words"](torch.zeros(len(rows), 10), torch.tensor(recent, dtype=torch.long), *words_of(*rows))
    assert set(got.unique().tolist()) <= {0.0, -INF}
    return [(row == -INF).nonzero().flatten().tolist() for row in got]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([[-1, 4], [4, 5], [5, 1]], [[], [6], []]),  # committed 4, drafts 5, 1
        ([[-1, 5], [5, 1], [1, 2]], [[6], [], []]),  # committed 5, drafts 1, 2
    ],
)
def test_b25_a_bad_word_begun_in_the_drafts_is_banned_in_the_row_after_it(ops, text, expected):
    """Rows of one request: after the committed token, and after each draft; `recent` holds drafts as generated."""
    assert banned(ops, text, *[[[5, 6]]] * 3) == expected


def test_words_of_one_token_are_always_banned(ops):
    assert banned(ops, [[-1, -1], [1, 2]], [[3], [7]], [[0]]) == [[3, 7], [0]]


def test_every_word_is_matched_by_itself(ops):
    assert banned(ops, [[1, 2, 3]], [[2, 3, 9], [3, 8], [1, 7], [2, 3, 3], [4, 2, 3, 6]]) == [[3, 8, 9]]


def test_a_word_with_the_same_last_token_does_not_undo_a_ban(ops):
    assert banned(ops, [[1, 2]], [[2, 9], [5, 9]]) == [[9]]
    assert banned(ops, [[1, 2]], [[5, 9], [2, 9]]) == [[9]]


def test_a_word_of_equal_tokens_needs_all_of_them(ops):
    assert banned(ops, [[5, 5], [0, 5]], [[5, 5, 5]], [[5, 5, 5]]) == [[5], []]


def test_a_word_longer_than_the_text_is_not_matched(ops):
    assert banned(ops, [[-1, -1, 2]], [[1, 2, 3]]) == [[]]
    assert banned(ops, [[2]], [[1, 2, 3], [2, 4]]) == [[4]]
    assert banned(ops, [[]], [[2, 3], [1]]) == [[1]]


def test_no_words_change_nothing(ops):
    assert banned(ops, [[1, 2], [1, 2]], [], []) == [[], []]


def test_bad_words_equal_transformers(ops):
    """There the prompt counts as text too; here it is not given, so its text is what was generated."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        recent = torch.randint(3, (6, 5), generator=generator)
        words = [torch.randint(3, (n,), generator=generator).tolist() for n in (1, 2, 2, 3, 4, 5)]
        words = [list(word) for word in dict.fromkeys(map(tuple, words))]
        logits = torch.randn(6, 10, generator=generator)
        expected = logits_process.NoBadWordsLogitsProcessor(words)(recent, logits.clone())
        assert torch.equal(ops["apply_bad_words"](logits.clone(), recent, *words_of(*[words] * 6)), expected)
