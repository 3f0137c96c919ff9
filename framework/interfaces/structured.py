"""Structured outputs: what a request's text must look like, compiled, and where the request stands in it."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING

from workerkit.framework.interfaces.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    import numpy as np


class GrammarMatcher(abc.ABC):
    """Where one request stands in its grammar."""

    @abc.abstractmethod
    def fill(self, bitmask: np.ndarray, drafts: Sequence[int] = ()) -> None:
        """Write into [len(drafts) + 1, ceil(V / 32)] int32 which tokens may follow now (bit 1), after the first draft,
        and so on. Behind a draft that is not allowed everything is: it will be rejected. State does not change."""

    @abc.abstractmethod
    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on by these tokens. Raises RequestError for one that is not allowed."""

    @property
    @abc.abstractmethod
    def is_finished(self) -> bool:
        """Nothing but the end of the sequence may follow."""


class StructuredOutputs(abc.ABC):
    """Compiles what a request's text must look like: the engine's half of structured outputs."""

    @abc.abstractmethod
    def compile(self, params: StructuredOutputsParams) -> GrammarMatcher:
        """Raises RequestError for a schema or grammar that is not understood, UnsupportedError when this engine has no
        structured outputs."""
