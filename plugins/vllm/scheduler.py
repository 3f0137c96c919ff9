"""vLLM's schedulers, which end a request with an error when our worker says that it failed, and send whole pictures.

A worker of vLLM's has no other way to say so: an exception ends the engine, and with it every request. And vLLM leaves
out the pixels of pictures that its prefix cache covers, but does not send them when the request comes back after a
preemption and finds them covered no longer.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

_log = logging.getLogger(__name__)


class _ForOurWorker:
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]  # a mixin
        for new in output.scheduled_new_reqs:
            new.mm_features = self.requests[new.req_id].mm_features
        return output

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        outputs: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]  # a mixin
        failed = getattr(model_runner_output, "failed", {})
        for request in self.finish_requests(failed, RequestStatus.FINISHED_ERROR) if failed else ():
            _log.error("request %s failed in the worker: %s", request.request_id, failed[request.request_id])
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    stop_reason=failed[request.request_id],
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                )
            )
        return outputs


class FailingScheduler(_ForOurWorker, Scheduler):
    """For runners that wait for their tokens."""


class FailingAsyncScheduler(_ForOurWorker, AsyncScheduler):
    """For runners that do not."""
