"""No structured outputs."""

from __future__ import annotations

import torch

from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.request import GrammarOutput, NewRequest
from workerkit.framework.interfaces.sampling import Grammar


class NoGrammar(Grammar):
    """Refuses structured requests and their bitmasks: neither may be decoded freely."""

    def add(self, slot: int, request: NewRequest) -> None:
        if request.sampling.structured_outputs is not None:
            raise UnsupportedError(f"request {request.req_id!r} is structured, and components.grammar is none")

    def apply(self, logits: torch.Tensor, batch: InputBatch, grammar: GrammarOutput | None) -> torch.Tensor:
        if grammar is None:
            return logits
        raise UnsupportedError("the step carries grammar bitmasks, and components.grammar is none")
