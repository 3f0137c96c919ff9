"""What a decode step costs as things grow: python tests/benchmarks/scaling.py [--only context] [--runner v2]

A random network of one tiny layer, so that little but the host's work is left. Four curves: requests in the batch (1
to 256), tokens of context (to 8192), blocks of the cache (to 100 000) and the vocabulary (to 131 072). Columns are
medians in microseconds a step: scheduler (schedule and update), block tables, the worker without forward, sampling and
block tables, then the network's forward, and lm_head with sampling.

Under each curve stand the slopes of log(cost) against log(size), by regression: 0 is constant, 1 is linear. Scheduler
and block tables should cost what is scheduled and what changes: at most 1 against the batch, about 0 against the rest.
The block tables of a batch are copied whole, in one array operation: that shows at long contexts. Tests count the same
in instructions (`tests/components/engine/test_scheduler_cost.py`, `tests/components/block_table/test_cost.py`).
"""

import argparse
import math
import statistics
import time

import attrs
from tqdm import tqdm

from workerkit.framework import roles
from workerkit.framework.assembly import Assembly
from workerkit.framework.interfaces.engine import EngineRequest
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.plan import make_plan
from workerkit.framework.plugins import load_plugins

BLOCK, STEPS = 16, 48
BASE = {"batch": 8, "context": 64, "blocks": 4000, "vocabulary": 256}
CURVES = {
    "batch": [1, 2, 4, 8, 16, 32, 64, 128, 256],
    "context": [64, 128, 256, 512, 1024, 2048, 4096, 8192],
    "blocks": [300, 1000, 3000, 10_000, 30_000, 100_000],
    "vocabulary": [256, 1024, 4096, 16_384, 65_536, 131_072],
}
COLUMNS = ("scheduler", "tables", "worker", "forward", "sample")
EXPECTED = ("scheduler", "tables")  # whose slopes are claims


def config(runner, batch, context, blocks, vocabulary):
    loader = {"use": "random", "vocab_size": vocabulary, "hidden_size": 16, "intermediate_size": 16, "head_dim": 16}
    loader |= {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    loader["max_position_embeddings"] = context + 2 * STEPS
    return {
        "model": {"source": "none", "max_model_len": context + 2 * STEPS},
        "limits": {"max_num_reqs": batch, "max_num_batched_tokens": 4096},
        "cache": {"block_size": BLOCK, "num_blocks": blocks},
        "components": {"runner": runner, "loader": loader, "graph": "none", "observers": ["timings"]},
    }


def watched(factory, spent):
    """A subclass that adds the seconds of its public methods to spent[0]; inner calls count once."""
    depth = [0]

    def timed(method):
        def call(self, *args):
            begin, depth[0] = time.perf_counter(), depth[0] + 1
            try:
                return method(self, *args)
            finally:
                depth[0] -= 1
                spent[0] += 0 if depth[0] else time.perf_counter() - begin

        return call

    methods = {
        name: timed(getattr(factory, name)) for name in ("append", "stage", "apply", "gather") if hasattr(factory, name)
    }
    return type(f"Watched{factory.__name__}", (factory,), methods)


def decode(runner, batch, **sizes):
    """Median microseconds a decode step, by column."""
    spent = [0.0]
    plan = make_plan(load_plugins().registry, config(runner, batch, **sizes))
    table = plan.nodes["block_table"]
    nodes = {**plan.nodes, "block_table": attrs.evolve(table, factory=watched(table.factory, spent))}
    rows = []
    with Assembly(attrs.evolve(plan, nodes=nodes), {}, observed=True) as assembly:
        worker = assembly.worker
        worker.start()
        scheduler, (timings,) = assembly.get(roles.SCHEDULER), assembly.get_all(roles.OBSERVERS)
        for number in range(batch):
            ids = [(number * 31 + position * 7) % sizes["vocabulary"] for position in range(sizes["context"])]
            params = SamplingParams(temperature=0.0, max_tokens=2 * STEPS)
            scheduler.add(EngineRequest(req_id=f"r{number}", prompt_token_ids=tuple(ids), params=params))
        while len(rows) < STEPS:
            timings.start()
            spent[0] = 0.0
            begin = time.perf_counter()
            output = scheduler.schedule()
            scheduled = time.perf_counter()
            worker.execute_model(output)
            answer = worker.sample_tokens().get()
            answered = time.perf_counter()
            scheduler.update(output, answer)
            updated = time.perf_counter()
            phases = {phase.name: (phase.end - phase.begin) / 1e9 for phase in timings.stop()}
            if output.total_num_scheduled_tokens == batch and len(output.num_scheduled_tokens) == batch:
                rest = answered - scheduled - spent[0] - phases["forward"] - phases["sample"]
                scheduling = scheduled - begin + updated - answered
                rows.append((scheduling, spent[0], rest, phases["forward"], phases["sample"]))
    return [1e6 * statistics.median(column) for column in zip(*rows, strict=True)]


def blocks_for(sizes):
    """Enough of them for the batch."""
    needed = sizes["batch"] * (math.ceil((sizes["context"] + 2 * STEPS) / BLOCK) + 1) + 1
    return {**sizes, "blocks": max(sizes["blocks"], needed)}


def show(axis, runner, points):
    print(f"\n{runner}: {axis}")
    print(f"{axis:>12}" + "".join(f"{name:>11}" for name in COLUMNS) + "  scheduler + tables")
    top = max(costs[0] + costs[1] for costs in points.values())
    for size, costs in points.items():
        bar = "#" * round(40 * (costs[0] + costs[1]) / top)
        print(f"{size:>12}" + "".join(f"{cost:11.1f}" for cost in costs) + f"  {bar}")
    slopes = []
    for column, name in enumerate(COLUMNS):
        costs = [math.log(max(point[column], 1e-3)) for point in points.values()]
        slope = statistics.linear_regression([math.log(size) for size in points], costs).slope
        limit = " (claim: <= 1)" if axis == "batch" else " (claim: ~0)"
        slopes.append(f"{name} {slope:.2f}{limit if name in EXPECTED else ''}")
    print("slopes: " + ", ".join(slopes))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CURVES, default=list(CURVES))
    parser.add_argument("--runner", nargs="+", choices=["v1", "v2"], default=["v1", "v2"])
    args = parser.parse_args()
    for runner in args.runner:
        decode(runner, **BASE)  # warm
        for axis in args.only:
            points = {}
            for size in tqdm(CURVES[axis], desc=axis, leave=False):
                points[size] = decode(runner, **blocks_for({**BASE, axis: size}))
            show(axis, runner, points)


if __name__ == "__main__":
    main()
