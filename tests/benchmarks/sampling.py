"""What sampling costs beside the forward of the same step.

    python tests/benchmarks/sampling.py [--batch 32] [--new 48] [--runs 3] [--dtype bfloat16]

SmolLM2-135M (vocabulary 49152), decode steps of a full batch, both runners. "Forward" is the step from its prepared
batch to its logits; "sampling" is all that the sampler does: process, draw, log-probabilities, commit. Each line is the
median over the decode steps of all runs, and the share of the median forward of the same runs.
"""

import argparse
import statistics
import time
from collections import defaultdict

import attrs
import torch

from workerkit.components.sampler.torch_sampler import TorchSampler
from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.hooks import hookimpl
from workerkit.framework.interfaces.observer import Observer
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.plugins import load_plugins

PROMPT = 32
TRUNCATED = SamplingParams(temperature=0.8, top_k=50, top_p=0.9)
BUT_ALLOWED = SamplingParams(
    temperature=0.8,
    top_k=50,
    top_p=0.9,
    min_p=0.02,
    typical_p=0.95,
    top_n_sigma=3.0,
    presence_penalty=0.2,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
    min_tokens=40,
    stop_token_ids=(7, 8, 9),
    logit_bias=dict.fromkeys(range(500, 530), 1.0),
    bad_words_token_ids=tuple((token, token + 1, token + 2) for token in range(600, 620)),
)
CASES = {
    "default parameters": SamplingParams(),
    "greedy": SamplingParams(temperature=0.0),
    "top-k 50, top-p 0.9": TRUNCATED,
    "top-p 0.9 alone": SamplingParams(top_p=0.9),
    "every stage but allowed ids": BUT_ALLOWED,
    "every stage": attrs.evolve(BUT_ALLOWED, allowed_token_ids=tuple(range(1000, 3000))),
    "default and 20 logprobs": SamplingParams(logprobs=20),
}
TIMES = defaultdict(list)


class Timed(TorchSampler):
    """Adds up what a step spends in the sampler."""

    spent = 0.0


def timed(name):
    method = getattr(TorchSampler, name)

    def wrapper(self, *args):
        begin = time.perf_counter()
        try:
            return method(self, *args)
        finally:
            Timed.spent += time.perf_counter() - begin

    return wrapper


for name in ("raw", "process", "draw", "logprobs", "prompt_logprobs", "commit"):
    setattr(Timed, name, timed(name))


class Watch(Observer):
    """Decode steps of the whole batch only."""

    @hookimpl
    def batch_prepared(self, batch):
        self.begin, self.counts = time.perf_counter(), batch.num_tokens == batch.num_reqs
        Timed.spent = 0.0

    @hookimpl
    def tokens_sampled(self):
        self.before_commit = time.perf_counter() - self.begin - Timed.spent

    @hookimpl
    def step_finished(self, batch):
        if self.counts:
            TIMES["forward"].append(self.before_commit)
            TIMES["sampling"].append(Timed.spent)


def build(runner, batch, dtype):
    registry = load_plugins().registry
    stages = registry.offers[roles.SAMPLER.name]["torch"].parts["stages"]
    registry.add(roles.SAMPLER, "timed", Timed, parts={"stages": stages})
    registry.add(roles.OBSERVERS, "watch", Watch)
    config = {
        "model": {"source": "smollm2", "dtype": dtype, "max_model_len": 512},
        "limits": {"max_num_reqs": batch, "max_num_batched_tokens": 1024},
        "cache": {"memory_bytes": 2**30},
        "components": {"runner": runner, "sampler": "timed", "observers": ["watch"]},
    }
    return assemble(config, registry=registry)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    ids = torch.randint(100, 40000, (args.batch, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    print(f"batch {args.batch}, {args.dtype}, {torch.get_num_threads()} threads; medians in ms")
    print(f"{'':34}{'forward':>10}{'sampling':>10}{'share':>8}")
    for runner in ("v1", "v2"):
        with build(runner, args.batch, args.dtype) as assembly:
            assembly.engine.start()
            for name, params in CASES.items():
                TIMES.clear()
                for seed in range(args.runs):
                    banned = args.new if params.min_tokens else 0  # to the last step
                    wanted = attrs.evolve(params, max_tokens=args.new, min_tokens=banned, ignore_eos=True)
                    assembly.engine.generate(
                        ids, [attrs.evolve(wanted, seed=seed * 1000 + i) for i in range(args.batch)]
                    )
                forward, sampling = (1e3 * statistics.median(TIMES[what]) for what in ("forward", "sampling"))
                print(f"{runner} {name:31}{forward:10.2f}{sampling:10.2f}{sampling / forward:8.1%}", flush=True)


if __name__ == "__main__":
    main()
