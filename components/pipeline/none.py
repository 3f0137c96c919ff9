"""All layers run here."""

from __future__ import annotations

from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.extensions import PipelineStage
from workerkit.framework.interfaces.model import ModelOutput
from workerkit.framework.interfaces.sampling import SamplerOutput


class NoPipeline(PipelineStage):
    """The first stage is the last."""

    @property
    def is_last(self) -> bool:
        return True

    def receive(self, batch: InputBatch) -> None:
        return None

    def send(self, output: ModelOutput) -> None:
        raise UnsupportedError("components.pipeline: none has no next stage")

    def broadcast(self, output: SamplerOutput) -> None:
        pass

    def receive_sampled(self, batch: InputBatch) -> SamplerOutput:
        raise UnsupportedError("components.pipeline: none has no last stage elsewhere")
