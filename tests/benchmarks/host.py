"""Where the host time of a decode step goes: all of an engine's step but forward, lm_head and drafting.

    python tests/benchmarks/host.py [--steps 300] [--batch 1 8 32] [--warm] [--skip-phases]

The network is replaced by one that costs nothing: its forward returns zeros and its head the same logits each time.
Everything else is real, the tokenizer of SmolLM2 included. A real forward leaves the processor's caches full of
weights; so does this one, by reading 64 MB. `--warm` leaves that out, as in a loop over nothing but host code.

"step" is a whole step of the engine, less that read and the sampling kernel. With asynchronous scheduling it is what
these do not hide. A clock around them would then include waiting for the interpreter, which is host work: so what is
taken off is what they took without it. They are slower beside other work, so the figure errs upwards.

The phases come from a second run with a clock around each of them, which costs some microseconds; each excludes what
is called within it and listed by itself. "hand-offs" is the rest: threads that wake up or wait for the interpreter, and
the clocks.
"""

import argparse
import statistics
import threading
import time
from collections import defaultdict
from contextlib import contextmanager

import torch

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.interfaces.model import LoadedModel, ModelOutput
from workerkit.framework.interfaces.sampling_params import SamplingParams

PROMPT, WARM_UP, VOCAB = 32, 20, 1024
CASES = {"v1": ("v1", False), "v2": ("v2", False), "v2 async": ("v2", True)}
PHASES = {  # phase -> role and methods
    "schedule": (roles.SCHEDULER, "schedule"),
    "update": (roles.SCHEDULER, "update"),
    "plan": (roles.REQUEST_STATE, "add remove update plan"),
    "build": (roles.INPUT_BATCH, "remove sync build"),
    "tables": (roles.BLOCK_TABLE, "append stage apply gather"),
    "metadata": (roles.ATTENTION, "build"),
    "sample": (roles.SAMPLER, "raw process draw logprobs prompt_logprobs"),
    "commit": (roles.REQUEST_STATE, "commit"),
    "copies": (roles.DEVICE, "copy_to_host"),
    "runner": (roles.WORKER, "execute_model sample_tokens"),
}
COLUMNS = [*PHASES, "engine", "hand-offs"]


class Clock:
    """Seconds by phase; those of an inner phase are not the outer one's. Threads have stacks of their own."""

    def __init__(self):
        self.spent = defaultdict(float)
        self._local = threading.local()

    @contextmanager
    def phase(self, name):
        stack = self._local.__dict__.setdefault("stack", [])
        begin, inner = time.perf_counter(), len(stack)
        stack.append(0.0)
        try:
            yield
        finally:
            total = time.perf_counter() - begin
            self.spent[name] += total - stack.pop()
            if inner:
                stack[-1] += total

    def around(self, name, function):
        def timed(*args):
            with self.phase(name):
                return function(*args)

        return timed


def timed(function, seconds):
    def wrapper(*args):
        begin = time.perf_counter()
        result = function(*args)
        seconds.append(time.perf_counter() - begin)
        return result

    return wrapper


class StillNetwork:
    """Stands in for a network's `forward` and `compute_logits`, and notes the seconds that do not count."""

    def __init__(self, assembly, num_tokens, is_cold):
        self._hidden = torch.zeros(num_tokens, 1)
        self._logits = torch.randn(num_tokens, VOCAB, generator=torch.Generator().manual_seed(0))
        self._weights = torch.ones(2**24) if is_cold else torch.ones(1)
        self.not_counted = [], []  # of the forward, and of the sampling kernel
        self._read = timed(self._weights.sum, self.not_counted[0])
        network, kernels = assembly.value(LoadedModel).network, assembly.get(roles.KERNELS)
        for name in ("forward", "compute_logits"):
            object.__setattr__(network, name, getattr(self, name))
        kernels.greedy_tokens = timed(kernels.greedy_tokens, self.not_counted[1])

    def forward(self, inputs):
        self._read()
        return ModelOutput(hidden=self._hidden[: len(inputs.input_ids)], taps={})

    def compute_logits(self, hidden):
        return self._logits[: len(hidden)]


def start(runner, is_async):
    config = {
        "model": {"source": "smollm2", "max_model_len": 1024},
        "limits": {"max_num_reqs": 32, "max_num_batched_tokens": 1024},
        "cache": {"memory_bytes": 2**26},
        "components": {
            "runner": runner,
            "graph": "none",  # whatever it replays is the forward
            "loader": {"use": "random", "vocab_size": 49152},
            "scheduler": {"use": "continuous", "async_scheduling": is_async},
        },
    }
    assembly = assemble(config)
    assembly.engine.start()
    return assembly


def watch(assembly, clock):
    """Put the clock around every phase."""
    for name, (role, methods) in PHASES.items():
        part = assembly.get(role)
        for method in methods.split():
            if hasattr(part, method):
                setattr(part, method, clock.around(name, getattr(part, method)))
    device = assembly.get(roles.DEVICE)
    submit = device.submit

    def timed_submit(work):
        pending = submit(clock.around("runner", work))
        pending.wait = clock.around("wait", pending.wait)
        return pending

    device.submit = timed_submit


def run(assembly, batch, steps, is_cold, with_phases):
    """Seconds of a decode step, whole and by phase, and what of it does not count: forward, sampling kernel. Lower
    quartiles, because other processes only ever add."""
    engine, clock = assembly.engine, Clock()
    network = StillNetwork(assembly, 1024, is_cold)
    if with_phases:
        watch(assembly, clock)
    ids = torch.randint(100, 40000, (batch, PROMPT), generator=torch.Generator().manual_seed(batch)).tolist()
    greedy = SamplingParams(temperature=0.0, max_tokens=steps + WARM_UP, ignore_eos=True)
    for prompt in ids:
        engine.add_request(prompt, greedy)
    samples = []
    while engine.has_unfinished:
        clock.spent.clear()
        begin = time.perf_counter()
        with clock.phase("engine"):
            deltas = engine.step()
        total = time.perf_counter() - begin
        if len(deltas) == batch:
            spent = dict(clock.spent)
            spent.pop("wait", None)
            spent["hand-offs"] = total - sum(spent.values())
            samples.append({**spent, "step": total})
    found = {name: quartile([s.get(name, 0.0) for s in samples[WARM_UP:]]) for name in (*COLUMNS, "step")}
    not_counted = [quartile(times[-steps:]) for times in network.not_counted]
    for name, seconds in zip(("runner", "sample"), not_counted, strict=True):
        found[name] -= seconds
    return found, not_counted


def quartile(values):
    return statistics.quantiles(values, n=4)[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--warm", action="store_true", help="leave the caches to the host code")
    parser.add_argument("--skip-phases", action="store_true")
    args = parser.parse_args()
    print(f"microseconds a step, lower quartiles of {args.steps}; {torch.get_num_threads()} threads")
    print(f"{'':14}{'step':>8}" + ("" if args.skip_phases else "".join(f"{name:>10}" for name in COLUMNS)))
    alone = {}  # (runner, batch) -> what does not count, without asynchronous scheduling
    for case, (runner, is_async) in CASES.items():
        for batch in args.batch:
            with start(runner, is_async) as assembly:
                found, not_counted = run(assembly, batch, args.steps, not args.warm, False)
            not_counted = alone.setdefault((runner, batch), not_counted)
            line = f"{case:9} b{batch:<3} {1e6 * (found['step'] - sum(not_counted)):8.0f}"
            if not (args.skip_phases or is_async):  # its threads' phases are not those of one step
                with start(runner, is_async) as assembly:
                    found, _ = run(assembly, batch, args.steps, not args.warm, True)
                line += "".join(f"{1e6 * found[name]:10.0f}" for name in COLUMNS)
            print(line, flush=True)


if __name__ == "__main__":
    main()
