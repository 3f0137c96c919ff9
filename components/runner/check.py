"""What a runner refuses before it does anything of a step."""

from __future__ import annotations

from workerkit.framework.errors import RequestError, did_you_mean
from workerkit.framework.interfaces.batch import RequestStates
from workerkit.framework.interfaces.request import NewRequest, SchedulerOutput
from workerkit.framework.interfaces.runner import RunnerParts, WorkerShape


def check_output(
    output: SchedulerOutput,
    states: RequestStates,
    shape: WorkerShape,
    num_groups: int,
    parts: RunnerParts,
) -> None:
    """Refuse a step that contradicts what the runner knows, before anything of it is done. Raises RequestError."""
    new, cached, scheduled = output.new_requests, output.cached_requests, output.num_scheduled_tokens
    staying = set(states.req_ids) - output.finished_req_ids - output.preempted_req_ids
    computed = {r.req_id: r.num_computed_tokens for r in new}
    computed.update({r.req_id: r.num_computed_tokens for r in cached})
    problems = [problem for request in new for problem in _of_new(request, staying, shape)]
    problems += [
        f"new request {r.req_id!r} names adapter {r.lora!r}; {did_you_mean(r.lora, parts.lora.adapters)}"
        for r in new
        if r.lora is not None and r.lora not in parts.lora.adapters
    ]
    if not parts.encoder.accepts_images:
        problems += [f"new request {r.req_id!r} has pictures, which this worker does not see" for r in new if r.images]
    problems += [f"cached request {r.req_id!r} is not known here" for r in cached if r.req_id not in staying]
    if len(computed) != len(new) + len(cached):
        problems.append("a request is scheduled twice")
    if computed.keys() != scheduled.keys():
        problems.append("num_scheduled_tokens does not name exactly the new and cached requests")
    if scheduled and min(scheduled.values()) < 1:
        problems.append("num_scheduled_tokens must be >= 1 for each request")
    if (total := output.total_num_scheduled_tokens) > shape.max_num_batched_tokens:
        problems.append(f"{total} tokens are scheduled, max_num_batched_tokens is {shape.max_num_batched_tokens}")
    if (live := len(staying.union([r.req_id for r in new]))) > shape.max_num_reqs:
        problems.append(f"{live} requests would be live, max_num_reqs is {shape.max_num_reqs}")
    problems += [
        f"a copy of the state of request {save.req_id!r} is asked for, which is not scheduled"
        for save in output.state_saves
        if save.req_id not in scheduled
    ]
    blocks = [(r.req_id, r.block_ids) for r in new] + [(r.req_id, r.new_block_ids) for r in cached if r.new_block_ids]
    problems += [
        f"request {req_id!r} has blocks for {len(groups)} of {num_groups} cache groups"
        for req_id, groups in blocks
        if len(groups) != num_groups
    ]
    problems += [
        f"request {req_id!r} would reach position {computed[req_id] + count}, max_model_len is {shape.max_model_len}"
        for req_id, count in scheduled.items()
        if req_id in computed and computed[req_id] + count > shape.max_model_len
    ]
    if problems:
        raise RequestError("the step is refused:\n  - " + "\n  - ".join(problems))


def _of_new(request: NewRequest, staying: set[str], shape: WorkerShape) -> list[str]:
    name, problems = f"new request {request.req_id!r}", []
    if request.req_id in staying:
        problems.append(f"{name} is already here")
    if not 0 < request.prompt_len <= request.prefill_len <= shape.max_model_len:
        problems.append(
            f"{name} has {request.prefill_len} tokens (prompt {request.prompt_len}); "
            f"max_model_len is {shape.max_model_len}"
        )
    elif not 0 <= min(request.token_ids) <= max(request.token_ids) < shape.vocab_size:
        problems.append(f"{name} has token ids outside 0..{shape.vocab_size - 1}")
    return problems
