"""Experts stay where they are."""

from __future__ import annotations

from workerkit.framework.interfaces.extensions import EPLBController
from workerkit.framework.interfaces.model import LoadedModel


class NoEPLB(EPLBController):
    """Balances nothing."""

    def prepare_load(self, loaded: LoadedModel) -> None:
        pass

    def prepare_forward(self, num_tokens: int, has_prefill: bool) -> None:
        pass

    def step(self, is_dummy: bool) -> None:
        pass
