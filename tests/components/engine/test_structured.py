"""The structured requests of an engine: which rows a step's masks have, and what ends a request."""

import numpy as np
import pytest

from workerkit.components.engine.structured import StructuredRequests
from workerkit.framework.errors import RequestError
from workerkit.framework.interfaces.request import SchedulerOutput
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


def step(*req_ids):
    return SchedulerOutput(num_scheduled_tokens=dict.fromkeys(req_ids, 1))


def test_masks_are_in_the_order_of_the_step(requests):
    output = requests.output(step("b", "x", "a"))
    assert output.req_ids == ("b", "a")
    assert output.bitmask.dtype == np.int32
    assert output.bitmask.tolist() == [[5, 5], [3, 3]]  # 40 tokens are two words
    assert requests.output(step("a")).req_ids == ("a",)


def test_drafts_have_rows_of_their_own(requests):
    output = requests.output(step("a", "x", "b"), {"a": [7, 8], "x": [1]})
    assert output.req_ids == ("a", "b")
    assert output.bitmask[:, 0].tolist() == [3, 7, 8, 5]


def test_a_step_without_structured_requests_has_no_masks(requests):
    assert requests.output(step("x")) is None
    assert requests.waits_for(step("x")) == frozenset()
    assert requests.waits_for(step("x", "b")) == {"b"}


def test_accept_says_when_nothing_can_follow(requests):
    assert not requests.accept("a", [3, 2])
    assert requests.output(step("a")).bitmask[0, 0] == 1
    assert requests.accept("a", [1, 0])
    assert not requests.accept("x", [9])  # no grammar, no opinion
    with pytest.raises(RequestError, match="not 9"):
        requests.accept("b", [9])


def test_removed_requests_are_forgotten(requests):
    requests.remove("a")
    requests.remove("a")
    assert len(requests) == 1
    assert requests.output(step("a")) is None
