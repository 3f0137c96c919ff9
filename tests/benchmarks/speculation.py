"""Speculation on the real model: tokens per second of each proposer beside plain decoding, and what it accepts.

    python tests/benchmarks/speculation.py --drafts FOLDER [--runs 3] [--prompts 52] [--new 96] [--only NAME …]

SmolLM2-135M in bfloat16, batch 1, greedy, V2. FOLDER holds trained drafts (smollm2-eagle3, smollm2-dflash,
smollm2-dspark); without it only the proposers that need none take part. Each contestant has a process of its own and
waits while another runs; they take turns within each run. Acceptance is cumulative: the share of verified proposals of
which at least the first j drafts were accepted. "Drafting" is the median time of the proposer in a step. The text of
every contestant must be plain decoding's, except where the top two logits are nearly equal: differences are counted.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import torch
from heldout_prompts import EDITED_CODE, HELD_OUT

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.hooks import hookimpl
from workerkit.framework.interfaces.observer import Observer
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.plugins import load_plugins

CONTESTANTS = {  # name: (K, speculator, draft)
    "plain": (0, "none", None),
    "ngram": (4, "ngram", None),
    "suffix": (8, "suffix", None),
    "eagle3": (2, "eagle3", "smollm2-eagle3"),
    "dflash": (5, "dflash", "smollm2-dflash"),
    "dspark": (5, "dspark", "smollm2-dspark"),
}


class Watch(Observer):
    """Counts drafts and their fate, and the time between the tokens and the next drafts."""

    def __init__(self) -> None:
        self.reset()

    def reset(self):
        self.scheduled, self.accepted, self.seconds, self.steps, self.tokens = [], Counter(), [], 0, 0

    @hookimpl
    def step_started(self, output):
        if output.num_scheduled_tokens:
            self.scheduled.append(dict(output.scheduled_drafts))

    @hookimpl
    def tokens_sampled(self):
        self.begin = time.perf_counter()

    @hookimpl
    def drafts_proposed(self):
        self.seconds.append(time.perf_counter() - self.begin)

    @hookimpl
    def output_ready(self, output):
        drafts = self.scheduled.pop(0)
        for req_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            self.tokens += len(tokens)
            self.steps += bool(tokens)
            if drafts.get(req_id):
                self.accepted["verified"] += 1
                self.accepted.update(range(1, len(tokens)))


def build(name, drafts):
    length, speculator, folder = CONTESTANTS[name]
    registry = load_plugins().registry
    registry.add(roles.OBSERVERS, "watch", Watch)
    components = {"runner": "v2", "observers": ["watch"], "speculator": speculator}
    if folder is not None:
        components["draft"] = {"use": "checkpoint", "source": str(Path(drafts) / folder)}
    config = {
        "model": {"source": "smollm2", "dtype": "bfloat16", "max_model_len": 1024},
        "limits": {"max_num_reqs": 1, "max_num_batched_tokens": 1024, "num_speculative_tokens": length},
        "cache": {"memory_bytes": 2**28},
        "components": components,
    }
    return assemble(config, registry=registry)


def serve(name, drafts, pipe):
    """Answers (messages, new tokens) with (seconds, token ids, counts of the proposer)."""
    with build(name, drafts) as assembly:
        engine = assembly.engine
        engine.start()
        (watch,) = assembly.get_all(roles.OBSERVERS)
        pipe.send("ready")
        while (asked := pipe.recv()) is not None:
            text, count = asked
            watch.reset()
            engine.reset_prefix_cache()
            params = SamplingParams(temperature=0.0, max_tokens=count)
            begin = time.perf_counter()
            tokens = [t for d in engine.chat([{"role": "user", "content": text}], params) for t in d.token_ids]
            seconds = time.perf_counter() - begin
            pipe.send((seconds, tokens, watch.accepted, watch.steps, watch.tokens, watch.seconds))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafts")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=len(HELD_OUT))
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--only", nargs="+", default=list(CONTESTANTS))
    args = parser.parse_args()
    names = [n for n in CONTESTANTS if n in {"plain", *args.only} and (args.drafts or CONTESTANTS[n][2] is None)]
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name in names:
        pipes[name], theirs = spawn.Pipe()
        processes.append(spawn.Process(target=serve, args=(name, args.drafts, theirs), daemon=True))
        processes[-1].start()
        pipes[name].recv()
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    texts = {"held-out prompts": HELD_OUT[: args.prompts], "edited code": (EDITED_CODE,)}
    for what, prompts in texts.items():
        speeds = {name: [] for name in names}
        counts = {name: Counter() for name in names}
        drafting = {name: [] for name in names}
        other = Counter()
        for _ in range(args.runs):
            spent, made = Counter(), Counter()
            for prompt in prompts:
                plain = None
                for name in names:
                    pipes[name].send((prompt, args.new if what != "edited code" else 256))
                    seconds, tokens, accepted, steps, total, times = pipes[name].recv()
                    spent[name] += seconds
                    made[name] += len(tokens)
                    counts[name] += accepted
                    counts[name].update(steps=steps, tokens=total)
                    drafting[name] += times
                    plain = tokens if plain is None else plain
                    other[name] += tokens != plain
            for name in names:
                speeds[name].append(made[name] / spent[name])
        print(f"\n{what}, median of {args.runs} runs")
        for name in names:
            ratio = statistics.median(a / b for a, b in zip(speeds[name], speeds["plain"], strict=True))
            verified = max(counts[name]["verified"], 1)
            shares = " ".join(f"{counts[name][j] / verified:.2f}" for j in range(1, CONTESTANTS[name][0] + 1))
            milliseconds = f"{1e3 * statistics.median(drafting[name]):.2f} ms" if drafting[name] else ""
            a_step = counts[name]["tokens"] / max(counts[name]["steps"], 1)
            print(
                f"{name:8} {statistics.median(speeds[name]):6.1f} tokens/s {ratio:5.2f}x   "
                f"{a_step:.2f} tokens a step   accepted {shares or '-':30}"
                f" drafting {milliseconds:8} other text {other[name]} of {len(prompts) * args.runs}",
                flush=True,
            )
    for pipe in pipes.values():
        pipe.send(None)
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
