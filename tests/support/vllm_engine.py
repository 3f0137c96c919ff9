"""vLLM's own engine and scheduler in this process, around our worker; and our engine on the same model, to compare.

The same requests go to both: parameters are named alike, but for what vLLM has no field for.
"""

import contextlib
import random
import threading

import attrs
import pytest

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.interfaces.sampling_params import SamplingParams

MAX_MODEL_LEN = 160
VOCAB = 49152
VARIANTS = {"v1": ("v1", False), "v2": ("v2", True), "v2-waits": ("v2", False)}  # (runner, asynchronous scheduling)
EACH = ("v1", "v2", pytest.param("v2-waits", marks=pytest.mark.newest))  # for parameters of tests
_OF_EXTRA_ARGS = ("typical_p", "top_n_sigma")


@attrs.frozen(eq=False)
class Ask:
    """A request; `fields` as our SamplingParams names them."""

    prompt: tuple[int, ...]
    fields: dict

    def vllm_params(self):
        from vllm import SamplingParams as VllmParams

        fields, extra = {**self.fields}, {**self.fields.get("extra_args", {})}
        extra |= {name: fields.pop(name) for name in _OF_EXTRA_ARGS if name in fields}
        return VllmParams(**(fields | ({"extra_args": extra} if extra else {})))

    def our_params(self):
        return SamplingParams(**self.fields)


def ask(prompt, **fields):
    return Ask(tuple(prompt), {"temperature": 0.0, "ignore_eos": True, **fields})


def prompts(lengths, seed=0):
    """Random token ids of these lengths; specials, which have the lowest ids, do not occur."""
    numbers = random.Random(seed)
    return [[numbers.randrange(100, VOCAB) for _ in range(length)] for length in lengths]


def config(runner, **sections):
    """A workerkit config with room for everything; `components` are joined to the runner's."""
    components = {"runner": runner, "device": "cpu", **sections.pop("components", {})}
    return {"cache": {"num_blocks": 128}, "components": components, **sections}


@contextlib.contextmanager
def vllm_engine(model, workerkit, asynchronous=None, **options):
    """An LLM around the worker of that config, which steps 16 tokens at a time; options as of LLM. At the end no thread
    of ours is left."""
    from vllm import LLM

    before = our_threads()
    defaults = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    given = {**defaults, "dtype": "float32", "disable_log_stats": False, **options}
    llm = LLM(model=str(model), async_scheduling=asynchronous, additional_config={"workerkit": workerkit}, **given)
    ours = our_threads() - before
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
    assert ours, "the worker has none: this check is blind"
    assert not [thread.name for thread in ours if thread.is_alive()]


def our_threads():
    return {thread for thread in threading.enumerate() if "workerkit" in thread.name}


@contextlib.contextmanager
def our_engine(model, runner="v1", **sections):
    """The standalone engine on the same model, which takes whole prompts in a step."""
    limits = {"max_num_reqs": 16, "max_num_batched_tokens": 512}
    source = {"model": {"source": str(model), "max_model_len": MAX_MODEL_LEN}, "limits": limits}
    with assemble(config(runner, **source, **sections)) as assembly:
        assembly.engine.start()
        yield assembly.engine


def worker_of(llm):
    """Our VllmWorker."""
    return llm.llm_engine.model_executor.driver_worker.worker


def num_requests(llm):
    """How many requests our worker holds."""
    return worker_of(llm)._assembly.get(roles.RUNNER).num_requests


def counter(llm, name):
    """A counter of vLLM's metrics; that of the newest LLM in this process."""
    (found,) = [metric for metric in llm.get_metrics() if metric.name == f"vllm:{name}"]
    return getattr(found, "values", None) or found.value


def generate(llm, asks):
    """vLLM's RequestOutputs."""
    wanted = [{"prompt_token_ids": [*one.prompt]} for one in asks]
    return llm.generate(wanted, [one.vllm_params() for one in asks], use_tqdm=False)


def completions(engine, asks):
    """Our Completions."""
    return engine.generate([one.prompt for one in asks], [one.our_params() for one in asks])


def said_by_vllm(outputs):
    """[(tokens, why it ended)] of completions; vLLM counts the token that stopped one among its tokens."""
    return [
        (tuple(one.token_ids[: -1 if one.finish_reason == "stop" else None]), one.finish_reason)
        for one in (completion for output in outputs for completion in output.outputs)
    ]


def said_by_us(completions):
    """The same of ours."""
    return [(one.token_ids, one.finish_reason) for one in completions]
