"""How many drafts a proposer may make."""

from __future__ import annotations

from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.runner import WorkerShape


def num_drafts(shape: WorkerShape) -> int:
    """K of a worker that speculates. Raises UnsupportedError for 0: a proposer without drafts is a config's mistake."""
    if not shape.num_speculative_tokens:
        raise UnsupportedError(
            "limits.num_speculative_tokens is 0, so components.speculator may propose nothing; "
            "right: 1 or more, or speculator: none"
        )
    return shape.num_speculative_tokens
