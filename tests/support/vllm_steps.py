"""vLLM's values as its scheduler sends them, in the protocol of its V1 runner and in that of its V2 runner; and its
configuration and its engine around a workerkit config."""

import json

import attrs
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from workerkit.framework import roles
from workerkit.framework.interfaces.request import ModelRunnerOutput
from workerkit.plugins.vllm.adapter import Requests
from workerkit.plugins.vllm.adapters import Adapters

PROTOCOLS = ("v1", "v2")


@attrs.frozen(kw_only=True, eq=False)
class Entry:
    """A request that enters, or that comes back: then `generated` follows its prompt."""

    req_id: str
    prompt: list = attrs.field(converter=list)
    generated: list = attrs.field(factory=list)
    blocks: tuple = ([1],)
    computed: int = 0
    params: SamplingParams = attrs.field(factory=SamplingParams)
    more: dict = attrs.field(factory=dict)  # other fields of NewRequestData
    kind: type = NewRequestData

    @property
    def tokens(self):
        return self.prompt + self.generated

    def new(self, protocol):
        fields = {
            "req_id": self.req_id,
            "prompt_token_ids": self.prompt,
            "prefill_token_ids": self.tokens if protocol == "v2" else None,
            "mm_features": [],
            "sampling_params": self.params,
            "pooling_params": None,
            "block_ids": self.blocks,
            "num_computed_tokens": self.computed,
            "lora_request": None,
        }
        return self.kind(**(fields | self.more))


def enter(req_id="r", prompt=(1, 2, 3), **more):
    return Entry(req_id=req_id, prompt=prompt, **more)


def scheduled(protocol="v1", counts=None, new=(), running=(), resumed=(), **more):
    """A SchedulerOutput. new, resumed: Entry; running: (req_id, num_computed_tokens, blocks to append or None); counts:
    tokens of each request, for those that enter all by default, else one; more: other fields."""
    every = {one.req_id: len(one.tokens) - one.computed for one in new} | {req_id: 1 for req_id, *_ in running}
    every |= {one.req_id: len(one.tokens) - one.computed for one in resumed}
    if protocol == "v2":
        new, resumed = (*new, *resumed), ()
    cached = CachedRequestData.make_empty()
    rows = [*running, *((one.req_id, one.computed, one.blocks) for one in resumed)]
    for row in rows:
        for column, value in zip((cached.req_ids, cached.num_computed_tokens, cached.new_block_ids), row, strict=True):
            column.append(value)
    cached.resumed_req_ids = {one.req_id for one in resumed}
    cached.all_token_ids = {one.req_id: one.tokens for one in resumed}
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [one.new(protocol) for one in new]
    output.scheduled_cached_reqs = cached
    output.num_scheduled_tokens = every | (counts or {})
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    for name, value in more.items():
        assert hasattr(output, name), name
        setattr(output, name, value)
    return output


def requests(seed=0, check=lambda request: None, worker=None, max_adapters=0):
    return Requests(check, Adapters(worker, max_adapters), seed)


def result(tokens, **more):
    """Our worker's answer; tokens: those of each request by its id."""
    return ModelRunnerOutput(req_ids=tuple(tokens), sampled_token_ids=tuple(map(tuple, tokens.values())), **more)


MODEL = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}


def write_config_json(folder):
    """A model folder without weights: all that vLLM's configuration reads, and our random loader needs none."""
    content = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", **MODEL}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def workerkit_config(runner="v2", **sections):
    """A worker for that folder; `components` are joined to the others."""
    components = {"runner": runner, "loader": {"use": "random", **MODEL}, **sections.pop("components", {})}
    return {"cache": {"num_blocks": 40}, "components": components, **sections}


def vllm_config(folder, workerkit, **options):
    """VllmConfig as EngineArgs make it."""
    options = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 48, **options}
    options.setdefault("additional_config", {"workerkit": workerkit})
    return EngineArgs(model=str(folder), skip_tokenizer_init=True, **options).create_engine_config()


@attrs.define(eq=False)
class Told:
    """What the engine has said of a request."""

    tokens: list = attrs.field(factory=list)
    finish_reason: object = None
    stop_reason: object = None
    prompts: list = attrs.field(factory=list)  # of each time: its prompt's log-probabilities
    chosen: list = attrs.field(factory=list)  # of each token: its log-probability


class Core:
    """vLLM's engine core and scheduler in this process; `steps` is what our worker was told."""

    def __init__(self, config):
        self.core = EngineCore(config, UniProcExecutor, log_stats=False)
        self.worker = self.core.model_executor.driver_worker.worker
        self._read, self.worker._requests.read = self.worker._requests.read, self._record

    def begin(self, protocol):
        """From now on the scheduler speaks that protocol, whichever runner is inside."""
        self.core.scheduler.use_v2_model_runner = protocol == "v2"
        self.told, self.steps = {}, []

    def _record(self, scheduled):
        step = self._read(scheduled)
        self.steps.append(step.output)
        return step

    def add(self, req_id, prompt, params):
        fields = {"request_id": req_id, "prompt_token_ids": [*prompt], "sampling_params": params, "arrival_time": 0.0}
        fields |= dict.fromkeys(("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank"))
        self.core.add_request(*self.core.preprocess_add_request(EngineCoreRequest(**fields)))
        self.told[req_id] = Told()

    def step(self):
        outputs, executed = self.core.step_fn()
        self.core.post_step(executed)
        for output in (one for some in (outputs or {}).values() for one in some.outputs):
            told = self.told[output.request_id]
            told.tokens += output.new_token_ids
            told.finish_reason, told.stop_reason = output.finish_reason, output.stop_reason
            if output.new_prompt_logprobs_tensors is not None:
                told.prompts.append(output.new_prompt_logprobs_tensors)
            if output.new_logprobs is not None:
                told.chosen += output.new_logprobs.logprobs[:, 0].tolist()
        self.worker.check_integrity()

    def run(self):
        """To the end, when nothing is left of any request."""
        while self.core.scheduler.has_requests() or self.core.batch_queue:
            self.step()
        assert self.worker._assembly.get(roles.RUNNER).num_requests == 0
        assert not self.worker._requests._live
        assert not self.worker._requests._refused
        return self.told

    def preempted(self):
        return [req_id for step in self.steps for req_id in step.preempted_req_ids]
