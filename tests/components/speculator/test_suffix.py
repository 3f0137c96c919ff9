"""Suffix decoding: counts and drafts against plain counting in Python; what is remembered; what it costs."""

import math
import random
from collections import Counter

import pytest

from workerkit.components.speculator.suffix import PastOutputs, SuffixConfig, SuffixSpeculator
from workerkit.components.speculator.suffix_tree import ROOT, Cursor, SuffixTree
from workerkit.framework.errors import UnsupportedError
from workerkit.framework.hooks import WorkerHooks, hookimpl
from workerkit.framework.interfaces.request import NewRequest
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.testing.conformance_speculation import Row, draft_inputs


def speculator(count=4, hooks=None, max_model_len=4096, **options):
    shape = WorkerShape(
        max_model_len=max_model_len,
        max_num_reqs=4,
        max_num_batched_tokens=64,
        vocab_size=100,
        num_speculative_tokens=count,
    )
    return SuffixSpeculator(SuffixConfig(**options), shape, hooks or WorkerHooks())


def request(tokens, prompt_len=None):
    return NewRequest(
        req_id="r",
        token_ids=tuple(tokens),
        prompt_len=prompt_len or len(tokens),
        sampling=SamplingParams(),
        block_ids=((1,),),
    )


def step(part, *sampled, slot=0):
    row = Row(slot=slot, computed=0, tokens=[0] * len(sampled), drafts=len(sampled) - 1, sampled=sampled, prompt_len=1)
    return part.propose(draft_inputs([row])).token_ids.tolist()[0]


def run(part, prompt, output, slot=0):
    """A whole life: what was proposed at its end."""
    part.add(slot, request(prompt))
    for token in output:
        drafts = step(part, token, slot=slot)
    part.clear(slot)
    return drafts


def substrings(texts, depth):
    return Counter(
        tuple(text[start:end])
        for text in texts
        for start in range(len(text))
        for end in range(start + 1, min(start + depth, len(text)) + 1)
    )


def find(tree, substring):
    node = ROOT
    for token in substring:
        node = tree.children[node].get(token)
        if node is None:
            return None
    return node


@pytest.mark.parametrize("depth", [1, 3, 100])
def test_counts_are_those_of_all_substrings_up_to_the_depth(depth):
    rng = random.Random(depth)
    for _ in range(40):
        symbols = rng.randrange(1, 5)
        texts = [[rng.randrange(symbols) for _ in range(rng.randrange(1, 30))] for _ in range(rng.randrange(1, 5))]
        tree = SuffixTree(depth)
        for text in texts:
            tree.start()
            tree.extend(text)
        expected = substrings(texts, depth)
        for substring, count in expected.items():
            assert tree.counts[find(tree, substring)] == count, (texts, substring)
        for _ in range(30):
            other = [rng.randrange(symbols + 1) for _ in range(rng.randrange(1, depth + 1))]
            if tuple(other) not in expected:
                assert find(tree, other) is None
        assert len(tree.links) <= 2 * sum(map(len, texts)) + 1


def test_a_cursor_stands_at_the_longest_suffix_while_the_tree_grows():
    rng = random.Random(1)
    tree, texts = SuffixTree(6), []
    for _ in range(40):
        texts.append([rng.randrange(3) for _ in range(8)])
        tree.start()
        cursor, fed = Cursor(tree, 6), []
        for token in texts[-1]:
            tree.append(token)
            fed.append(rng.randrange(3))
            cursor.feed(fed[-1])
            for node, length in cursor.suffixes():
                assert find(tree, fed[len(fed) - length :]) == node
        again = Cursor(tree, 6)
        for token in fed:
            again.feed(token)
        longest = max(n for n in range(7) if n == 0 or find(tree, fed[-n:]) is not None)
        assert again.length == longest


def plain(own, others, room, depth, factor, offset, least):
    """The rule, word for word: matches of growing length, greedy continuations, the highest score."""
    best, drafts = 0.0, []
    for texts in (own, *others):
        counts = substrings(texts, depth + room)
        best_here, drafts_here = 0.0, []
        for matched in range(1, min(depth, len(own[0])) + 1):
            node = tuple(own[0][-matched:])
            if node not in counts:
                break
            budget = min(room, math.floor(matched * factor + offset))
            found, score, probability = [], 0.0, 1.0
            while len(found) < budget:
                ways = {s[-1]: n for s, n in counts.items() if len(s) == len(node) + 1 and s[:-1] == node}
                if not ways:
                    break
                most = max(ways.values())
                if sum(n == most for n in ways.values()) > 1:
                    return None  # a tie: either way is right
                token = max(ways, key=ways.get)
                probability *= most / counts[node]
                if probability < least:
                    break
                found.append(token)
                score += probability
                node = (*node, token)
            if score > 0 and score >= best_here:
                best_here, drafts_here = score, found
        if best_here > best:
            best, drafts = best_here, drafts_here
    return drafts


@pytest.mark.parametrize(
    "options",
    [
        {"max_depth": 8},
        {"max_depth": 3, "spec_offset": 1.0},
        {"max_depth": 20, "max_spec_factor": 0.5, "min_token_prob": 0.3},
    ],
)
def test_drafts_are_those_of_a_plain_search(options):
    config, rng, room, compared = SuffixConfig(**options), random.Random(7), 3, 0
    for _ in range(60):
        part = speculator(room, **options)
        past = []
        for _ in range(rng.randrange(3)):
            output = [rng.randrange(4) for _ in range(rng.randrange(1, 15))]
            run(part, [9], output)
            past.append(output)
        text = [rng.randrange(4) for _ in range(rng.randrange(2, 25))]
        part.add(0, request(text[:1]))
        for token in text[1:]:
            drafts = step(part, token)
        expected = plain(
            [text], [past], room, config.max_depth, config.max_spec_factor, config.spec_offset, config.min_token_prob
        )
        if expected is not None:
            assert drafts == expected + [-1] * (room - len(expected)), (text, past)
            compared += len(expected) > 0
    assert compared > 10


def test_what_was_accepted_is_text_and_what_was_rejected_is_not():
    part = speculator(4)
    part.add(0, request([1, 2, 3, 4, 5, 9, 1]))
    assert step(part, 2) == [3, 4, -1, -1], "two tokens match, so two are drafted"
    row = Row(slot=0, computed=7, tokens=[2, 3, 4], drafts=2, sampled=[3, 7], prompt_len=1)  # 4 was rejected
    part.propose(draft_inputs([row]))
    assert step(part, 2)[0] == 3
    assert step(part, 3)[0] == 7 or step(part, 3)[0] == 4
    assert part._texts[0].tokens[:10] == [1, 2, 3, 4, 5, 9, 1, 2, 3, 7]


def test_others_outputs_are_drafted_from_and_their_prompts_are_not():
    part = speculator(2)
    run(part, [5, 6, 7, 8], [10, 11, 12, 13])
    part.add(1, request([1]))
    assert step(part, 11, slot=1) == [12, -1]
    assert step(part, 6, slot=1) == [-1, -1]


def test_requests_are_kept_apart_where_that_is_asked_for():
    part = speculator(2, global_tree=False)
    run(part, [5], [10, 11, 12, 13])
    part.add(1, request([1]))
    assert step(part, 11, slot=1) == [-1, -1]


def test_the_oldest_outputs_are_forgotten_first():
    past = PastOutputs(8, 4)
    for number in range(9):
        past.add([number, 100])
        kept = {token for tree in past.trees for token in tree.children[ROOT]} - {100}
        assert number in kept
        assert kept == set(range(min(kept), number + 1)), "the newest without a gap"
        assert len(kept) <= 4


def test_a_resumed_request_brings_its_text_and_counts_once():
    part = speculator(3)
    part.add(0, request([1]))
    for token in (7, 8, 9):
        step(part, token)
    part.clear(0)  # preempted
    part.add(2, request([1, 7, 8, 9], prompt_len=1))
    assert step(part, 7, slot=2)[0] == 8
    part.clear(2)
    tree = part._past.trees[-1]
    assert tree.counts[find(tree, [8])] == 1


def test_a_slot_forgets():
    part = speculator(2, global_tree=False)
    part.add(0, request([1, 2, 3, 1]))
    part.clear(0)
    part.clear(0)
    part.add(0, request([4, 1]))
    assert step(part, 2) == [-1, -1]


def test_a_prefill_that_goes_on_gets_no_drafts_and_reads_are_told():
    class Reads:
        def __init__(self):
            self.parts = []

        @hookimpl
        def host_tokens_read(self, part):
            self.parts.append(part)

    hooks, reads = WorkerHooks(), Reads()
    hooks.join(0, "reads", reads)
    part = speculator(2, hooks)
    part.add(0, request([1, 2, 1, 2, 1]))
    part.add(1, request([1, 2, 1, 2, 1]))
    rows = [
        Row(slot=0, computed=0, tokens=[1, 2, 1, 2, 1], sampled=[2], prompt_len=5),
        Row(slot=1, computed=0, tokens=[1, 2], next_token=1),
    ]
    drafts = part.propose(draft_inputs(rows)).token_ids
    assert drafts.tolist() == [[1, 2], [-1, -1]]
    assert reads.parts == ["SuffixSpeculator"]
    assert SuffixSpeculator.reads_host_tokens


def test_no_draft_stands_beyond_the_context_and_a_failed_request_is_no_text():
    part = speculator(4, max_model_len=8)
    part.add(0, request([1, 2, 3, 4, 1]))
    assert step(part, 2) == [3, 4, -1, -1]
    assert step(part, 3) == [4, -1, -1, -1]
    assert step(part, -1) == [4, -1, -1, -1]


def test_it_needs_a_number_of_drafts():
    with pytest.raises(UnsupportedError, match=r"limits\.num_speculative_tokens"):
        speculator(0)
