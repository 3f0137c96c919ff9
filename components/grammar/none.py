"""No structured outputs."""

from __future__ import annotations

import torch

from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.request import GrammarOutput
from workerkit.framework.interfaces.sampling import Grammar


class NoGrammar(Grammar):
    """Refuses bitmasks."""

    def apply(self, logits: torch.Tensor, batch: InputBatch, grammar: GrammarOutput) -> torch.Tensor:
        raise UnsupportedError("the step carries grammar bitmasks, and components.grammar is none")
