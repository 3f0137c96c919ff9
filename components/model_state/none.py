"""Models that keep nothing beside the paged cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.extensions import ModelState
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.sampling import SamplerOutput


class NoModelState(ModelState):
    """Keeps nothing. Raises UnsupportedError for a network that has to have something kept."""

    def __init__(self, loaded: LoadedModel) -> None:
        kept = {
            "recurrent layers": loaded.network.recurrent_layers,
            "positions in three dimensions (mrope_section)": loaded.config.rope.mrope_section,
        }
        if needed := [name for name, value in kept.items() if value]:
            raise UnsupportedError(
                f"components.model_state: none keeps nothing, and {loaded.config.architecture} has "
                f"{' and '.join(needed)}; right: auto_detect"
            )

    def preprocess(self, batch: InputBatch) -> None:
        pass

    def extras(self, batch: InputBatch) -> Mapping[str, Any]:
        return {}

    def commit(self, batch: InputBatch, output: SamplerOutput) -> None:
        pass
