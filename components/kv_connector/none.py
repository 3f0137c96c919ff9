"""KV blocks stay in this worker."""

from __future__ import annotations

from collections.abc import Sequence

from workerkit.framework.interfaces.batch import InputBatch
from workerkit.framework.interfaces.extensions import KVConnector
from workerkit.framework.interfaces.kv_cache import KVCaches
from workerkit.framework.interfaces.request import ModelRunnerOutput, SchedulerOutput


class NoKVConnector(KVConnector):
    """Moves nothing."""

    def register(self, caches: KVCaches) -> None:
        pass

    def preempted(self, req_ids: Sequence[str]) -> None:
        pass

    def no_forward(self, output: SchedulerOutput) -> ModelRunnerOutput:
        return ModelRunnerOutput()

    def start_load(self, batch: InputBatch) -> None:
        pass

    def wait_saved(self) -> None:
        pass

    def post_forward(self) -> None:
        pass
