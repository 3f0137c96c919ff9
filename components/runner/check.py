"""What a runner refuses before it does anything of a step."""

from __future__ import annotations

from workerkit.framework.errors import RequestError
from workerkit.framework.interfaces.batch import RequestStates
from workerkit.framework.interfaces.request import SchedulerOutput
from workerkit.framework.interfaces.runner import WorkerShape


def check_output(output: SchedulerOutput, states: RequestStates, shape: WorkerShape, num_groups: int) -> None:
    """Refuse a step that contradicts what the runner knows, before anything of it is done. Raises RequestError."""
    leaving = output.finished_req_ids | output.preempted_req_ids
    problems: list[str] = []
    new_ids = [request.req_id for request in output.new_requests]
    cached_ids = [request.req_id for request in output.cached_requests]
    for request in output.new_requests:
        if request.req_id in states and request.req_id not in leaving:
            problems.append(f"new request {request.req_id!r} is already here")
        if not 0 < request.prompt_len <= request.prefill_len <= shape.max_model_len:
            problems.append(
                f"new request {request.req_id!r} has {request.prefill_len} tokens (prompt {request.prompt_len}); "
                f"max_model_len is {shape.max_model_len}"
            )
        elif not 0 <= min(request.token_ids) <= max(request.token_ids) < shape.vocab_size:
            problems.append(f"new request {request.req_id!r} has token ids outside 0..{shape.vocab_size - 1}")
    for req_id in cached_ids:
        if req_id not in states or req_id in leaving:
            problems.append(f"cached request {req_id!r} is not known here")
    ids = [*new_ids, *cached_ids]
    if len(set(ids)) != len(ids):
        problems.append("a request is scheduled twice")
    if set(ids) != set(output.num_scheduled_tokens):
        problems.append("num_scheduled_tokens does not name exactly the new and cached requests")
    if any(count < 1 for count in output.num_scheduled_tokens.values()):
        problems.append("num_scheduled_tokens must be >= 1 for each request")
    if output.total_num_scheduled_tokens > shape.max_num_batched_tokens:
        problems.append(
            f"{output.total_num_scheduled_tokens} tokens are scheduled, max_num_batched_tokens is "
            f"{shape.max_num_batched_tokens}"
        )
    after = {req_id for req_id in states.req_ids if req_id not in leaving} | set(new_ids)
    if len(after) > shape.max_num_reqs:
        problems.append(f"{len(after)} requests would be live, max_num_reqs is {shape.max_num_reqs}")
    blocks = {r.req_id: r.block_ids for r in output.new_requests}
    blocks.update({r.req_id: r.new_block_ids for r in output.cached_requests if r.new_block_ids})
    for req_id, groups in blocks.items():
        if len(groups) != num_groups:
            problems.append(f"request {req_id!r} has blocks for {len(groups)} of {num_groups} cache groups")
    problems.extend(_lengths(output, shape))
    if problems:
        raise RequestError("the step is refused:\n  - " + "\n  - ".join(problems))


def _lengths(output: SchedulerOutput, shape: WorkerShape) -> list[str]:
    computed = {r.req_id: r.num_computed_tokens for r in output.new_requests}
    computed.update({r.req_id: r.num_computed_tokens for r in output.cached_requests})
    return [
        f"request {req_id!r} would reach position {computed[req_id] + count}, max_model_len is {shape.max_model_len}"
        for req_id, count in output.num_scheduled_tokens.items()
        if req_id in computed and computed[req_id] + count > shape.max_model_len
    ]
