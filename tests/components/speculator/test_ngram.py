"""What the ngram proposer finds, against a plain search in Python, and that it costs little."""

import random

import pytest
import torch

from workerkit.components.speculator import ngram
from workerkit.components.speculator.ngram import NgramConfig, NgramSpeculator
from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.request import NewRequest
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.testing.conformance_speculation import Row, draft_inputs

CPU = DeviceContext(device=torch.device("cpu"), dtype=torch.float32)


def speculator(count=1, min_n=2, max_n=4, max_model_len=128, max_num_reqs=4):
    shape = WorkerShape(
        max_model_len=max_model_len,
        max_num_reqs=max_num_reqs,
        max_num_batched_tokens=64,
        vocab_size=100,
        num_speculative_tokens=count,
    )
    return NgramSpeculator(NgramConfig(min_n=min_n, max_n=max_n), shape, CPU)


def request(tokens, req_id="r"):
    return NewRequest(
        req_id=req_id, token_ids=tuple(tokens), prompt_len=len(tokens), sampling=SamplingParams(), block_ids=((1,),)
    )


def plain(text, count, min_n, max_n, limit):
    """The rule, word for word."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(text) - n):
            if text[start : start + n] == text[len(text) - n :]:
                found = text[start + n : start + n + count][: max(limit - len(text), 0)]
                return [*found, *[-1] * (count - len(found))]
    return [-1] * count


def proposed(part, text, slot=0):
    """The request enters with all but the last token, which is sampled."""
    part.add(slot, request(text[:-1]))
    row = Row(slot=slot, computed=0, tokens=text[:-1], sampled=text[-1:], prompt_len=len(text) - 1)
    return part.propose(draft_inputs([row])).token_ids.tolist()[0]


def test_b56_the_longest_match_wins_then_the_leftmost():
    assert proposed(speculator(1, 2, 3), [1, 2, 3, 9, 1, 2, 3, 7, 1, 2, 3]) == [9]
    assert proposed(speculator(1, 2, 3), [5, 2, 3, 9, 1, 2, 3, 7, 1, 2, 3]) == [7], "a longer match stands later"


def test_drafts_may_run_into_the_last_tokens_and_end_with_the_text():
    assert proposed(speculator(4, 1, 3), [1, 1, 1]) == [1, -1, -1, -1]
    assert proposed(speculator(4, 2, 2), [3, 4, 3, 4]) == [3, 4, -1, -1]
    assert proposed(speculator(4, 2, 4), [1, 2, 3, 4]) == [-1] * 4
    assert proposed(speculator(4, 2, 4), [1, 2]) == [-1] * 4


def test_no_draft_stands_beyond_the_context():
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    assert proposed(speculator(4, 2, 2, max_model_len=10), text) == [3, 4, -1, -1]
    assert proposed(speculator(4, 2, 2, max_model_len=8), text) == [-1] * 4


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(("min_n", "max_n"), [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_it_finds_what_a_plain_search_finds_over_whole_lives_of_requests(min_n, max_n, kind, monkeypatch):
    """Mixed batches: decodes, steps with accepted and rejected drafts, prefills in parts; slots are used again."""
    if kind == "torch":  # as on any other device
        monkeypatch.setattr(ngram, "operand", lambda tensor: tensor)
    rng, count, limit = random.Random(min_n * 10 + max_n), 3, 60
    part = speculator(count, min_n, max_n, max_model_len=limit)
    texts, computed, seen = {}, {}, 0
    for step in range(120):
        for slot in range(4):
            if slot not in texts or len(texts[slot]) >= limit or rng.random() < 0.02:
                part.clear(slot)
                texts[slot], computed[slot] = [rng.randrange(3) for _ in range(rng.randrange(1, 12))], 0
                part.add(slot, request(texts[slot]))
        rows, live = [], rng.sample(sorted(texts), rng.randrange(1, 5))
        for slot in live:
            text, start = texts[slot], computed[slot]
            if start + 4 < len(text):
                rows.append(Row(slot=slot, computed=start, tokens=text[start : start + 4], next_token=text[start + 4]))
                computed[slot] += 4
                continue
            drafts = [rng.randrange(3) for _ in range(rng.randrange(0, count + 1))] if start + 1 == len(text) else []
            accepted = rng.randrange(len(drafts) + 1)
            sampled = [*drafts[:accepted], rng.randrange(3)][: limit - len(text)]
            tokens = [*text[start:], *drafts]
            rows.append(
                Row(slot=slot, computed=start, tokens=tokens, drafts=len(drafts), sampled=sampled, prompt_len=1)
            )
            text.extend(sampled)
            computed[slot] = len(text) - 1
        got = part.propose(draft_inputs(rows)).token_ids
        assert (got.shape, got.dtype) == ((len(rows), count), torch.int64)
        for row, drafts in zip(rows, got.tolist(), strict=True):
            expected = plain(texts[row.slot], count, min_n, max_n, limit) if row.sampled else [-1] * count
            assert drafts == expected, (step, row, texts[row.slot])
            seen += drafts[0] >= 0
    assert seen > 50


def test_there_may_be_more_requests_than_positions():
    part = speculator(1, 1, 1, max_model_len=4, max_num_reqs=20)
    for slot in range(20):
        part.add(slot, request([1]))
    rows = [Row(slot=slot, computed=0, tokens=[1], sampled=[1], prompt_len=1) for slot in range(20)]
    assert part.propose(draft_inputs(rows)).token_ids.tolist() == [[1]] * 20


def test_a_slot_forgets_and_a_resumed_request_brings_its_text():
    part = speculator(2, 2, 2)
    assert proposed(part, [1, 2, 3, 4, 5, 1, 2]) == [3, 4]
    part.clear(0)
    assert proposed(part, [7, 1, 2]) == [-1, -1]
    assert proposed(part, [1, 2, 8, 9, 1, 2], slot=1) == [8, 9]


def test_wrong_options_are_refused():
    with pytest.raises(UnsupportedError, match="min_n: 5 is more than max_n, 4"):
        speculator(1, 5, 4)
    with pytest.raises(UnsupportedError, match=r"limits\.num_speculative_tokens is 0"):
        speculator(0)
