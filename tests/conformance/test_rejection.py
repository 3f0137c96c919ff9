"""Our own rejection samplers through the suite, and that the suite notices what is wrong."""

import pytest

from workerkit.framework.testing.conformance_rejection import RejectionConformance

pytest_plugins = ("pytester",)


class TestRejection(RejectionConformance):
    pass


WRONG = """
import attrs
import pytest
from workerkit.components.rejection.rows import VerifyRows
from workerkit.components.rejection.standard import StandardRejection
from workerkit.framework import roles
from workerkit.framework.testing.conformance_rejection import RejectionConformance
from workerkit.framework.testing.registry import fake_registry


class Wrong(StandardRejection):
    def {method}


class TestWrong(RejectionConformance):
    names = ("wrong",)

    @pytest.fixture
    def registry(self):
        registry = fake_registry()
        registry.add(roles.REJECTION, "wrong", Wrong)
        return registry
"""

ACCEPTS_ALL = """verify(self, logits, batch, sampler):
        rows = VerifyRows.of(batch)
        drawn = sampler.draw(logits, batch)[rows.index]
        return rows.output(rows.counts, drawn.gather(1, rows.counts[:, None])[:, 0])
"""
NEVER_FORGETS = """clear(self, slot):
        pass

    def add(self, slot, request):
        pass
"""
FLATTENS = """remember(self, batch, drafts):
        flat = None if drafts.logits is None else drafts.logits * 0.5
        super().remember(batch, attrs.evolve(drafts, logits=flat))
"""


@pytest.mark.parametrize(
    ("method", "found"),
    [
        (ACCEPTS_ALL, "test_greedy_requests_get_what_is_likeliest"),
        (ACCEPTS_ALL, "test_placeholders_are_never_accepted"),
        (ACCEPTS_ALL, "test_a_row_without_a_possible_token_ends_what_the_request_yields"),
        (NEVER_FORGETS, "test_a_slot_forgets_the_drafts_before"),
        (FLATTENS, "test_outputs_are_distributed_like_the_target"),
    ],
    ids=["wrong_drafts", "placeholders", "no_token", "stale", "other_distribution"],
)
def test_the_suite_notices(pytester, method, found):
    pytester.makepyfile(WRONG.format(method=method))
    result = pytester.runpytest("-q", "-k", found)
    assert result.parseoutcomes()["failed"] >= 1
