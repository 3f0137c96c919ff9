"""The worker's half of structured outputs: which rows a mask reaches, and what happens to those it should have."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from workerkit.components.grammar.bitmask import BitmaskGrammar
from workerkit.components.grammar.none import NoGrammar
from workerkit.framework.errors import RequestError, UnsupportedError
from workerkit.framework.interfaces.batch import BatchPlan
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.request import GrammarOutput, NewRequest
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sampling_params import SamplingParams, StructuredOutputsParams
from workerkit.kernels.reference import OPS

VOCAB = 40  # two words, the second not full
SLOTS = {"r0": 3, "r1": 0, "r2": 1, "r3": 2}


class CountingKernels:
    def __init__(self):
        self.calls = []

    def apply_grammar_bitmask(self, logits, rows, bitmask):
        self.calls.append(rows.tolist())
        return OPS["apply_grammar_bitmask"](logits, rows, bitmask)


def bits(*allowed, words=2):
    row = np.zeros(words * 32, dtype=np.uint8)
    row[list(allowed)] = 1
    return np.packbits(row, bitorder="little").view(np.int32)


def batch(*req_ids, drafts=(), partial=()):
    count = len(req_ids)
    num_drafts = np.array([dict(drafts).get(r, 0) for r in req_ids], dtype=np.int32)
    plan = BatchPlan(
        req_ids=req_ids,
        slots=np.array([SLOTS[r] for r in req_ids]),
        num_scheduled_tokens=np.ones(count, dtype=np.int32) + num_drafts,
        num_computed_tokens=np.zeros(count, dtype=np.int32),
        num_draft_tokens=num_drafts,
        prefill_lens=np.array([5 if r in partial else 1 for r in req_ids], dtype=np.int32),
        prompt_lens=np.ones(count, dtype=np.int32),
    )
    ends = np.cumsum([0, *(num_drafts + 1)]).astype(np.int32)
    return SimpleNamespace(plan=plan, req_ids=req_ids, cu_num_logits_np=ends, num_logits=int(ends[-1]))


def request(req_id, structured):
    asked = StructuredOutputsParams(json_object=True) if structured else None
    sampling = SamplingParams(structured_outputs=asked)
    return NewRequest(req_id=req_id, token_ids=(1,), prompt_len=1, sampling=sampling, block_ids=((1,),))


@pytest.fixture
def kernels():
    return CountingKernels()


@pytest.fixture
def part(kernels):
    """r0 and r2 are structured, r1 and r3 are not."""
    shape = WorkerShape(max_model_len=8, max_num_reqs=4, max_num_batched_tokens=8, vocab_size=VOCAB)
    context = DeviceContext(device=torch.device("cpu"), dtype=torch.float32)
    part = BitmaskGrammar(shape=shape, context=context, kernels=kernels)
    for req_id, slot in SLOTS.items():
        part.add(slot, request(req_id, req_id in ("r0", "r2")))
    return part


def applied(part, step, grammar):
    """The ids that each logits row still allows; logits that are left must not have changed."""
    logits = torch.randn(step.num_logits, VOCAB)
    before = logits.clone()
    after = part.apply(logits, step, grammar)
    finite = torch.isfinite(after)
    assert torch.equal(after[finite], before[finite])
    assert (after[~finite] == float("-inf")).all()
    return [set(np.flatnonzero(row).tolist()) for row in finite.numpy()]


ALL = set(range(VOCAB))


def test_b94_masks_map_by_request_id_and_rows_of_others_stay(part, kernels):
    masks = GrammarOutput(req_ids=("r0", "r2"), bitmask=np.stack([bits(1, 31, 32), bits(39)]))
    assert applied(part, batch("r0", "r1", "r2"), masks) == [{1, 31, 32}, ALL, {39}]
    # the worker's order is not the engine's
    assert applied(part, batch("r2", "r3", "r1", "r0"), masks) == [{39}, ALL, ALL, {1, 31, 32}]
    assert kernels.calls == [[0, 2], [0, 3]]


def test_bit_i_of_word_j_is_token_32_j_plus_i(part):
    for token in (0, 1, 30, 31, 32, 33, 39):
        word = np.zeros((1, 2), dtype=np.uint32)
        word[0, token // 32] = 1 << (token % 32)  # bit 31 makes the word negative
        masks = GrammarOutput(req_ids=("r0",), bitmask=word.view(np.int32))
        assert applied(part, batch("r0"), masks) == [{token}]


def test_rows_of_drafts_follow_each_other(part):
    masks = GrammarOutput(req_ids=("r0", "r2"), bitmask=np.stack([bits(i) for i in range(5)]))
    step = batch("r2", "r1", "r0", drafts={"r2": 1, "r0": 2, "r1": 1})
    assert applied(part, step, masks) == [{3}, {4}, ALL, ALL, {0}, {1}, {2}]


def test_b95_a_structured_request_without_a_mask_fails_alone(part):
    masks = GrammarOutput(req_ids=("r2",), bitmask=bits(7)[None])
    assert applied(part, batch("r0", "r1", "r2"), masks) == [set(), ALL, {7}]
    assert applied(part, batch("r0", "r1", drafts={"r0": 1}), None) == [set(), set(), ALL]


def test_b95_a_prefill_that_does_not_end_needs_no_mask(part, kernels):
    assert applied(part, batch("r0", "r1", partial=("r0",)), None) == [ALL, ALL]
    assert kernels.calls == []


def test_masks_of_requests_that_are_gone_are_let_be(part):
    masks = GrammarOutput(req_ids=("gone", "r2", "gone too"), bitmask=np.stack([bits(0), bits(7), bits(1)]))
    assert applied(part, batch("r1", "r2"), masks) == [ALL, {7}]


def test_nothing_is_done_for_a_batch_without_structured_requests(part, kernels):
    assert applied(part, batch("r1", "r3"), None) == [ALL, ALL]
    assert kernels.calls == []


def test_a_slot_forgets(part):
    part.clear(SLOTS["r0"])
    assert applied(part, batch("r0"), None) == [ALL]
    part.add(SLOTS["r1"], request("r1", structured=True))
    assert applied(part, batch("r1"), None) == [set()]
    part.add(SLOTS["r1"], request("r1", structured=False))
    assert applied(part, batch("r1"), None) == [ALL]


@pytest.mark.parametrize(
    ("req_ids", "rows", "words"), [(("r0",), 2, 2), (("r0", "r2"), 1, 2), (("r0",), 1, 1), ((), 1, 2)]
)
def test_masks_of_the_wrong_size_are_refused(part, req_ids, rows, words):
    masks = GrammarOutput(req_ids=req_ids, bitmask=np.zeros((rows, words), dtype=np.int32))
    with pytest.raises(RequestError, match=f"{rows} rows of {words} words; right: {len(req_ids)} rows"):
        applied(part, batch("r0", "r2"), masks)


def test_words_beyond_the_vocabulary_are_let_be(part):
    masks = GrammarOutput(req_ids=("r0",), bitmask=bits(5, 70, words=3)[None])
    assert applied(part, batch("r0"), masks) == [{5}]


def test_b07_a_mask_of_the_end_alone_leaves_the_end_alone(part):
    """Whatever min_tokens says: no row is emptied here."""
    masks = GrammarOutput(req_ids=("r0",), bitmask=bits(2)[None])
    assert applied(part, batch("r0"), masks) == [{2}]


def test_none_refuses_structured_requests_and_their_masks():
    part = NoGrammar()
    logits = torch.zeros(1, VOCAB)
    part.add(0, request("r1", structured=False))
    assert part.apply(logits, batch("r1"), None) is logits
    with pytest.raises(UnsupportedError, match=r"'r0' is structured, and components\.grammar is none"):
        part.add(0, request("r0", structured=True))
    with pytest.raises(UnsupportedError, match="grammar bitmasks"):
        part.apply(logits, batch("r1"), GrammarOutput(req_ids=("r1",), bitmask=bits(1)[None]))
