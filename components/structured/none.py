"""No structured outputs."""

from __future__ import annotations

from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.sampling_params import StructuredOutputsParams
from workerkit.framework.interfaces.structured import GrammarMatcher, StructuredOutputs


class NoStructuredOutputs(StructuredOutputs):
    """Refuses requests that ask for them."""

    def compile(self, params: StructuredOutputsParams) -> GrammarMatcher:
        raise UnsupportedError("structured outputs need the package llguidance: pip install 'workerkit[structured]'")
