"""workerkit beside its peers, in one run: python tests/benchmarks/peers.py [--only workerkit,llama] [--json FILE]

The same work for everyone: SmolLM2-135M, prompts of random token ids, greedy, no end token.
b1, b8, b32: prompts of 32 tokens, 128 new ones. Tokens/s = N * 127 / (t(128 new) - t(1 new)).
prefill: 8 prompts of 512 tokens, one new. Tokens/s = 4096 / t.
workerkit-in-vllm is vLLM's engine and scheduler around our worker, in place of its own.
llama.cpp is measured by its llama-batched-bench, which neither samples nor schedules: an upper bound of its own.

Each contestant has a process of its own, which is stopped while another runs; they take turns within each round, so
that a slow minute hits all. The tables show medians with their spread (max - min) / median, and ours / best peer: the
median of the ratios within a round, with the least and the greatest. bf16 weights are compared with peers of bf16
weights, packed ones with every peer.

Peers that are not built are listed as such. What they need (each has an environment variable of the same name too):
  --vllm-venv DIR  PEERS_VLLM_VENV  a virtual environment with vLLM for CPUs, transformers and workerkit
  --llama-bin DIR  PEERS_LLAMA_BIN  the folder of llama-batched-bench
  --hf-dir DIR     PEERS_HF_DIR     the model's folder: config.json, tokenizer, bfloat16 safetensors
  --gguf-dir DIR   PEERS_GGUF_DIR   *.BF16.gguf, *.Q8_0.gguf, *.Q4_1.gguf, *.Q4_0.gguf
"""

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CASES = {"b1": (1, 32, 128), "b8": (8, 32, 128), "b32": (32, 32, 128), "prefill": (8, 512, 1)}  # prompts, length, new
CONFIGS = Path(__file__).parents[2] / "configs"


def prompts(count, length):
    source = random.Random(0)
    return [[source.randrange(100, 40000) for _ in range(length)] for _ in range(count)]


def rate(run, case):
    """Tokens per second; `run(prompts, new)` does the whole batch."""
    count, length, new = CASES[case]
    ids = prompts(count, length)

    def seconds(new):
        begin = time.perf_counter()
        run(ids, new)
        return time.perf_counter() - begin

    if new == 1:
        return count * length / seconds(1)
    first = seconds(1)
    return count * (new - 1) / (seconds(new) - first)


# What runs in a contestant's process: each returns (run, what it is)


def workerkit(config, settings):
    import torch

    from workerkit.framework.assembly import assemble
    from workerkit.framework.interfaces.sampling_params import SamplingParams

    assembly = assemble(config, settings)
    assembly.engine.start()

    def run(ids, new):
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        for done in assembly.engine.generate(ids, params):
            assert len(done.token_ids) == new, done.error

    return run, f"torch {torch.__version__}"


def vllm(model, eager=False, worker=None):
    """`worker`: a workerkit config, as a mapping; None is vLLM's own worker."""
    import vllm

    engine = vllm.LLM(
        model,
        additional_config={"workerkit": worker} if worker else {},
        dtype="bfloat16",
        enforce_eager=eager,
        max_model_len=2048,
        max_num_seqs=32,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
    )

    def run(ids, new):
        params = vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        for done in engine.generate([{"prompt_token_ids": one} for one in ids], params, use_tqdm=False):
            assert len(done.outputs[0].token_ids) == new

    return run, f"vllm {vllm.__version__}"


def hugging_face(model):
    import torch
    import transformers

    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    network.generation_config.eos_token_id = None

    def run(ids, new):
        ids = torch.tensor(ids)
        with torch.inference_mode():
            out = network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new,
                min_new_tokens=new,
                pad_token_id=2,
                eos_token_id=None,
            )
        assert out.shape == (len(ids), ids.shape[1] + new)

    return run, f"transformers {transformers.__version__}, torch {torch.__version__}"


def llama(binary, gguf, threads):
    """llama-batched-bench starts anew for each run, so this one's `run` answers the rate itself."""

    def run(case):
        count, length, new = CASES[case]
        command = [binary, "-m", gguf, "-t", threads, "-tb", threads, "-npl", count, "-npp", length, "-ntg", new]
        command += ["-c", max(2048, count * (length + new + 32)), "-b", 2048, "-ub", 512, "--output-format", "jsonl"]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if not rows:
            raise RuntimeError(done.stderr.strip()[-300:] or f"llama-batched-bench ended with {done.returncode}")
        return rows[-1]["speed_pp" if new == 1 else "speed_tg"]

    return run, Path(gguf).name


KINDS = {"workerkit": workerkit, "vllm": vllm, "hf": hugging_face, "llama": llama}


def serve(kind, options):
    """Answers each line on standard input, the name of a case, with tokens per second on standard output."""
    begin = time.perf_counter()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print
    run, about = KINDS[kind](**options)
    print(json.dumps(f"{about}, ready after {time.perf_counter() - begin:.1f} s"), file=answers)
    warm = set()
    for line in sys.stdin:
        case = line.strip()
        count, length, new = CASES[case]
        if kind == "llama":
            print(json.dumps(run(case)), file=answers)
            continue
        if case not in warm:
            warm.add(case)
            for few in (1, min(new, 8)):
                run(prompts(count, length), few)
        print(json.dumps(rate(run, case)), file=answers)


# The other end


class Contestant:
    """A process that is stopped unless it is asked something."""

    def __init__(self, name, kind, weights, options, python=sys.executable, env=None, needs=()):
        self.name, self.kind, self.weights, self.needs = name, kind, weights, [Path(need) for need in needs]
        self.ours = name.startswith("workerkit")
        self.about = ""
        self._command = [str(python), __file__, "--serve", kind, json.dumps(options)]
        self._env = env or {}

    def missing(self):
        return [str(path) for path in self.needs if not path.exists()]

    def start(self, threads):
        env = {**os.environ, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed with the process
        self._process = subprocess.Popen(
            self._command,
            env={**env, **self._env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
        )
        self.about = self._answer()

    def ask(self, case):
        os.kill(self._process.pid, signal.SIGCONT)
        print(case, file=self._process.stdin)
        return self._answer()

    def _answer(self):
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            last = [line.strip() for line in self._log.read().splitlines() if line.strip()][-4:]
            raise RuntimeError(f"ended with {self._process.returncode}: {' | '.join(last)[-400:]}")
        os.kill(self._process.pid, signal.SIGSTOP)
        return json.loads(line)

    @property
    def pid(self):
        return self._process.pid

    def stop(self):
        self._process.kill()  # a stopped process, too
        self._process.wait()
        self._log.close()


def contestants(args):
    no_cache = {"limits.max_num_reqs": 32, "components.scheduler.prefix_caching": False}
    bf16 = {**no_cache, "model.dtype": "bfloat16"}
    at_once = {"components.scheduler.async_scheduling": False}
    mine = dict(setting.split("=", 1) for setting in args.settings)
    for name, config, weights, settings in (
        ("v1-bf16", "cpu-v1", "bf16", bf16),
        ("v2-bf16", "cpu-fast", "bf16", no_cache),
        ("v1-q4", "cpu-q4", "q4_1", {**no_cache, **at_once, "components.runner": "v1"}),
        ("v2-q4", "cpu-q4", "q4_1", no_cache),
    ):
        path = CONFIGS / f"{config}.yaml"
        settings = {**settings, **{key: yaml_value(value) for key, value in mine.items()}}
        options = {"config": str(path), "settings": settings}
        yield Contestant(f"workerkit-{name}", "workerkit", weights, options, needs=[path])
    python = Path(args.vllm_venv) / "bin/python"
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR"}
    found = sorted(Path(args.vllm_venv).glob("lib/python*/site-packages/torch/lib/libgomp*.so*"))
    gomp = {"LD_PRELOAD": str(found[0]) if found else ""}
    for name, eager in (("compiled", False), ("eager", True)):
        options = {"model": args.hf_dir, "eager": eager}
        yield Contestant(f"vllm-{name}", "vllm", "bf16", options, python, {**env, **gomp}, needs=[python, args.hf_dir])
    for runner in ("v1", "v2"):
        env["WORKERKIT_CONFIG"] = str(CONFIGS / f"cpu-{runner}.yaml")  # makes the platform ours
        worker = {"model": {"dtype": "bfloat16"}, "cache": {"memory_bytes": 2**31}, "components": {"runner": runner}}
        options = {"model": args.hf_dir, "worker": worker}
        name = f"workerkit-in-vllm-{runner}"
        yield Contestant(name, "vllm", "bf16", options, python, dict(env), needs=[python, args.hf_dir])
    binary = Path(args.llama_bin) / "llama-batched-bench"
    for kind in ("BF16", "Q8_0", "Q4_1", "Q4_0"):
        gguf = next(Path(args.gguf_dir).glob(f"*{kind}.gguf"), Path(args.gguf_dir) / f"*.{kind}.gguf")
        options = {"binary": str(binary), "gguf": str(gguf), "threads": args.threads}
        yield Contestant(f"llama-{kind.lower()}", "llama", kind.lower(), options, needs=[binary, gguf])
    yield Contestant("hf-bf16", "hf", "bf16", {"model": args.hf_dir}, python, needs=[python, args.hf_dir])


def seconds_of_others(running):
    """Processor time since the machine started, less that of the contestants and of what they have run."""
    import psutil

    everything = psutil.cpu_times()
    own = [psutil.Process(entry.pid).cpu_times() for entry in running if psutil.pid_exists(entry.pid)]
    return everything.user + everything.nice + everything.system - sum(sum(times[:4]) for times in own)


def yaml_value(text):
    import yaml

    return yaml.safe_load(text)


def best_peer(entry, case, running, results):
    """The name of the fastest peer that an entry of ours is compared with; None when there is none."""
    rivals = [r.name for r in running if not r.ours and (entry.weights != "bf16" or r.weights == "bf16")]
    rivals = [name for name in rivals if results[name][case]]
    return max(rivals, key=lambda name: statistics.median(results[name][case]), default=None)


def ratios(running, cases, results):
    """By entry of ours and case: the best peer, and ours / its within each round."""
    found = {}
    for entry in running:
        for case in cases if entry.ours else ():
            peer = best_peer(entry, case, running, results)
            if peer and results[entry.name][case]:
                pairs = zip(results[entry.name][case], results[peer][case], strict=False)
                values = [ours / theirs for ours, theirs in pairs]
                found.setdefault(entry.name, {})[case] = {
                    "peer": peer,
                    "ratio": statistics.median(values),
                    "least": min(values),
                    "greatest": max(values),
                }
    return found


def print_tables(running, cases, results, found):
    width = max((len(entry.name) for entry in running), default=0)
    print(f"\ntokens/s, median (spread)\n{'':{width}} " + "".join(f"{case:>16}" for case in cases))
    for entry in running:
        cells = []
        for case in cases:
            values = results[entry.name][case]
            middle = statistics.median(values) if values else 0
            cells.append(f"{middle:8.1f} ({(max(values) - min(values)) / middle:4.0%})" if values else "failed")
        print(f"{entry.name:{width}} " + "".join(f"{cell:>16}" for cell in cells))
    print("\nours / best peer, median of the ratios within a round (least..greatest)")
    for name, columns in found.items():
        for case, its in columns.items():
            spread = f"({its['least']:.2f}..{its['greatest']:.2f})"
            print(f"{name:{width}} {case:>8} {its['ratio']:6.2f} {spread:14} {its['peer']}")


def main():
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], json.loads(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("vllm-venv", "llama-bin", "hf-dir", "gguf-dir"):
        variable = f"PEERS_{flag.upper().replace('-', '_')}"
        parser.add_argument(f"--{flag}", default=os.environ.get(variable, f"(no --{flag})"))
    parser.add_argument("--only", default="", help="comma-separated beginnings of names, like workerkit-v2,llama,vllm")
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", default=str(len(os.sched_getaffinity(0))))
    parser.add_argument("--set", action="append", default=[], dest="settings", help="PATH=VALUE, for workerkit")
    parser.add_argument("--json", help="write everything here")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # contestants are stopped: they would never end
    from tqdm import tqdm

    entries = [entry for entry in contestants(args) if entry.name.startswith(tuple(args.only.split(",")))]
    if not entries or args.runs < 1:
        parser.error("--only names no contestant" if not entries else f"--runs must be >= 1, got {args.runs}")
    not_built = {entry.name: f"no {', '.join(entry.missing())}" for entry in entries if entry.missing()}
    entries = [entry for entry in entries if entry.name not in not_built]
    results = {entry.name: {case: [] for case in args.case} for entry in entries}
    running, failed, begun, load = [], {}, None, None

    def guarded(entry, work):
        try:
            return work()
        except (RuntimeError, BrokenPipeError) as error:
            failed[entry.name] = str(error)
            return None

    try:
        for entry in tqdm(entries, desc="starting", leave=False):
            running.append(entry)
            guarded(entry, lambda entry=entry: entry.start(args.threads))
        begun, before = time.perf_counter(), seconds_of_others(running)
        orders = [running[:: 1 if number % 2 == 0 else -1] for number in range(args.runs)]
        turns = [(entry, case) for order in orders for case in args.case for entry in order]
        for entry, case in (bar := tqdm(turns, leave=False)):
            bar.set_description(f"{entry.name} {case}")
            if entry.name not in failed:
                value = guarded(entry, lambda entry=entry, case=case: entry.ask(case))
                results[entry.name][case] += [] if value is None else [value]
    except (KeyboardInterrupt, SystemExit):
        print("broken off: this is what there is")
    finally:
        if begun is not None:
            load = (seconds_of_others(running) - before) / (time.perf_counter() - begun)
            print(f"other processes took {load:.2f} processors meanwhile; more than 0.1 spoils every number")
        for entry in running:
            entry.stop()
    print(f"{args.threads} threads, {platform.processor() or platform.machine()}, {args.runs} rounds")
    for entry in running:
        print(f"  {entry.name}: {failed.get(entry.name, entry.about)}")
    for name, why in not_built.items():
        print(f"  {name}: not built ({why})")
    found = ratios(running, args.case, results)
    print_tables(running, args.case, results, found)
    if args.json:
        document = {"threads": args.threads, "runs": results, "ratios": found, "not_built": not_built, "failed": failed}
        document["processors_of_others"] = load
        Path(args.json).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
