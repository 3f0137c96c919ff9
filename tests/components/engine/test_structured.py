"""The structured requests of an engine: which rows a step's masks have, and what ends a request."""

import numpy as np
import pytest

from workerkit.components.engine.structured import StructuredRequests
from workerkit.framework.errors import RequestError
from workerkit.framework.interfaces.request import ModelRunnerOutput, SchedulerOutput
from workerkit.framework.interfaces.structured import GrammarMatcher


class Countdown(GrammarMatcher):
    """Each token is to be one less than the one before; 0 is the last. Its mask is the number itself."""

    def __init__(self, first):
        self.next = first

    def fill(self, bitmask, drafts=()):
        bitmask[:] = np.array([self.next, *drafts])[:, None]

    def accept(self, token_ids):
        for token_id in token_ids:
            if token_id != self.next:
                raise RequestError(f"not {token_id}")
            self.next -= 1

    @property
    def is_finished(self):
        return self.next < 0


@pytest.fixture
def requests():
    part = StructuredRequests(vocab_size=40)
    part.add("a", Countdown(3))
    part.add("b", Countdown(5))
    return part


def step(*req_ids, **drafts):
    counts = {req_id: 1 + drafts.get(req_id, 0) for req_id in req_ids}
    return SchedulerOutput(num_scheduled_tokens=counts, scheduled_drafts=drafts)


def proposed(**drafts):
    return ModelRunnerOutput(
        req_ids=tuple(drafts), sampled_token_ids=((0,),) * len(drafts), draft_token_ids=tuple(drafts.values())
    )


def test_masks_are_in_the_order_of_the_step(requests):
    output = requests.output(step("b", "x", "a"))
    assert output.req_ids == ("b", "a")
    assert output.bitmask.dtype == np.int32
    assert output.bitmask.tolist() == [[5, 5], [3, 3]]  # 40 tokens are two words
    assert requests.output(step("a")).req_ids == ("a",)


def test_drafts_have_rows_of_their_own(requests):
    requests.take_drafts(proposed(b=(9,), x=(1,), a=(7, 8)))
    output = requests.output(step("a", "x", "b", a=2, x=1))
    assert output.req_ids == ("a", "b")
    assert output.bitmask[:, 0].tolist() == [3, 7, 8, 5]


def test_drafts_that_are_not_verified_have_no_rows_and_placeholders_allow_everything(requests):
    requests.take_drafts(proposed(a=(7, 8), b=(9,)))
    assert requests.output(step("a", "b", a=1, b=3)).bitmask[:, 0].tolist() == [3, 7, 5, 9, -1, -1]
    assert requests.output(step("b", b=1)).bitmask[:, 0].tolist() == [5, 9]  # they stay until others come
    requests.take_drafts(proposed(a=(6,)))
    requests.take_drafts(ModelRunnerOutput(req_ids=("a",), sampled_token_ids=((1,),)))  # a step without speculation
    assert requests.output(step("a", "b", a=1, b=1)).bitmask[:, 0].tolist() == [3, 6, 5, 9]


def test_a_step_without_structured_requests_has_no_masks(requests):
    assert requests.output(step("x")) is None
    assert requests.waits_for(step("x")) == frozenset()
    assert requests.waits_for(step("x", "b")) == {"b"}


def test_accept_says_when_nothing_can_follow(requests):
    assert requests.accept("a", [3, 2]) is None
    assert requests.output(step("a")).bitmask[0, 0] == 1
    assert requests.accept("a", [1, 0, 39, 5]) == 2  # what was accepted behind the end does not count
    assert requests.accept("a", [7]) == 0
    assert requests.accept("x", [9]) is None  # no grammar, no opinion
    with pytest.raises(RequestError, match="not 9"):
        requests.accept("b", [9])


def test_removed_requests_are_forgotten(requests):
    requests.take_drafts(proposed(a=(7,), b=(8,), x=(9,)))
    requests.remove("a")
    requests.remove("a")
    assert len(requests) == 1
    assert set(requests._drafts) == {"b"}
    assert requests.output(step("a")) is None
