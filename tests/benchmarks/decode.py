"""Decode throughput of both runners beside Hugging Face `generate`, and the host overhead of a step.

    python tests/benchmarks/decode.py [--runs 5] [--batch 1 8 32] [--no-hf]

SmolLM2-135M in bfloat16, prompts of 32 random tokens, 128 new tokens, greedy, no end token. Each contestant has a
process of its own (threads of one would slow the others down) and waits while another runs; they take turns within each
run, so that a slow minute hits all of them. The table shows medians, the spread (max - min) / median, and the median of
the ratios within a run. Throughput is new tokens per second of the whole call, prompt included.
"""

import argparse
import multiprocessing
import statistics
import time
from contextlib import contextmanager

import torch

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.interfaces.model import LoadedModel
from workerkit.framework.interfaces.sampling_params import SamplingParams
from workerkit.framework.plugins import load_plugins

PROMPT, NEW = 32, 128
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)


def start(runner):
    config = {
        "model": {"source": "smollm2", "dtype": "bfloat16", "max_model_len": 512},
        "limits": {"max_num_reqs": 32, "max_num_batched_tokens": 1024},
        "cache": {"memory_bytes": 2**30},
        "components": {"runner": runner},
    }
    assembly = assemble(config)
    assembly.engine.start()
    return assembly


def hugging_face():
    from transformers import AutoModelForCausalLM, GgufConfig

    entry = load_plugins().registry.entry(roles.MODEL_STORE.name, "local")
    path = entry.factory(config=entry.config()).resolve("smollm2")
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    ).eval()


def prompts(batch, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(100, 40000, (batch, PROMPT), generator=generator)


def run_engine(assembly, ids):
    begin = time.perf_counter()
    done = assembly.engine.generate(ids.tolist(), GREEDY)
    elapsed = time.perf_counter() - begin
    assert all(len(completion.token_ids) == NEW for completion in done)
    return len(done) * NEW / elapsed


def run_hf(model, ids):
    begin = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
        )
    elapsed = time.perf_counter() - begin
    assert out.shape[1] == PROMPT + NEW
    return len(ids) * NEW / elapsed


@contextmanager
def timed_compute(assembly, spent):
    """Adds the seconds of forward, lm_head and sampling kernels to spent[0]."""
    network, sampler = assembly.value(LoadedModel).network, assembly.get(roles.SAMPLER)

    def timed(function):
        def wrapper(*args):
            begin = time.perf_counter()
            result = function(*args)
            spent[0] += time.perf_counter() - begin
            return result

        return wrapper

    places = [(network, "forward"), (network, "compute_logits"), (sampler, "process"), (sampler, "draw")]
    for owner, name in places:
        object.__setattr__(owner, name, timed(getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name in places:
            object.__delattr__(owner, name)


def overhead(assembly, batch):
    """(worker, engine): median milliseconds of a decode step that are not forward, lm_head and sampling kernels."""
    engine, worker = assembly.engine, assembly.worker
    spent = [0.0]
    in_worker, in_engine = [], []
    execute, sample = worker.execute_model, worker.sample_tokens
    clock = [0.0]

    def timed_execute(output):
        clock[0] = time.perf_counter()
        return execute(output)

    def timed_sample(grammar=None):
        pending = sample(grammar)
        pending.get()
        clock.append(time.perf_counter() - clock[0])
        return pending

    worker.execute_model, worker.sample_tokens = timed_execute, timed_sample
    with timed_compute(assembly, spent):
        for ids in prompts(batch, 7).tolist():
            engine.add_request(ids, GREEDY)
        while engine.has_unfinished:
            spent[0] = 0.0
            del clock[1:]
            begin = time.perf_counter()
            deltas = engine.step()
            total = time.perf_counter() - begin
            if len(deltas) == batch and len(clock) > 1:
                in_worker.append(clock[1] - spent[0])
                in_engine.append(total - spent[0])
    del worker.execute_model, worker.sample_tokens
    return 1e3 * statistics.median(in_worker), 1e3 * statistics.median(in_engine)


def serve(name, pipe):
    """A contestant's process: answers (batch, seed) with tokens per second, and "overhead" with milliseconds."""
    contestant = hugging_face() if name == "hf" else start(name)
    run = run_hf if name == "hf" else run_engine
    run(contestant, prompts(2, 0))  # warm
    pipe.send(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    while (asked := pipe.recv()) is not None:
        pipe.send(overhead(contestant, 8) if asked == "overhead" else run(contestant, prompts(*asked)))
    if name != "hf":
        contestant.shutdown()


def table(results, runs):
    print(f"\nnew tokens/s, median of {runs} runs (spread)")
    rows = []
    for batch, columns in results.items():
        cells = []
        for name, values in columns.items():
            median = statistics.median(values)
            cells.append(f"{name} {median:7.1f} ({(max(values) - min(values)) / median:4.0%})")
        line = f"b{batch:<3} " + "   ".join(cells)
        if "hf" in columns:
            for name in ("v1", "v2"):
                ratio = statistics.median(a / b for a, b in zip(columns[name], columns["hf"], strict=True))
                line += f"   {name}/hf {ratio:.2f}"
        rows.append(line)
    print("\n".join(rows))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--no-hf", action="store_true")
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name in ("v1", "v2") if args.no_hf else ("v1", "v2", "hf"):
        pipes[name], theirs = spawn.Pipe()
        processes.append(spawn.Process(target=serve, args=(name, theirs), daemon=True))
        processes[-1].start()
        print(f"{name}: {pipes[name].recv()}")

    def ask(name, what):
        pipes[name].send(what)
        return pipes[name].recv()

    results = {batch: {name: [] for name in pipes} for batch in args.batch}
    for number in range(args.runs):
        for batch in args.batch:
            for name in pipes:
                results[batch][name].append(ask(name, (batch, number)))
    table(results, args.runs)
    for name in ("v1", "v2"):
        samples = [ask(name, "overhead") for _ in range(3)]
        in_worker, in_engine = (statistics.median(values) for values in zip(*samples, strict=True))
        print(f"host overhead at batch 8, {name}: {in_worker:.2f} ms in the worker, {in_engine:.2f} ms with the engine")
    for pipe in pipes.values():
        pipe.send(None)
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
