"""How long loading takes, and how much memory it needs beside the weights.

    python tests/benchmarks/loading.py [--runs 5] [--layers 12] [--hidden 1024] [--case dense moe gguf]

Each load is a process of its own. Its seconds are those of making the LoadedModel, kernels and configs being there; its
peak is what the resident set grows by at most, from just before to the end, over the size of all weights in the target
dtype. `dense` and `moe` are safetensors files of random weights, written first; `gguf` is SmolLM2's. Linux only. CPU
seconds are printed, too: they say more where other processes want the same cores.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from workerkit.framework.assembly import assemble
from workerkit.framework.interfaces.model import LoadedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CASES = {
    "dense": [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16")],
    "moe": [("float32", "bfloat16"), ("bfloat16", "float32")],
    "gguf": [("gguf", "float32"), ("gguf", "bfloat16")],
}
EXPERTS = 8


def write(folder, moe, dtype, layers, hidden, vocab=32000):
    """A checkpoint as transformers saves it."""
    from safetensors.torch import save_file

    inner = hidden * 11 // 4
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if moe else "LlamaForCausalLM"],
        "model_type": "qwen3_moe" if moe else "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    mlps = ["mlp"]
    if moe:
        inner //= 4
        config |= {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": inner}
        mlps = [f"mlp.experts.{expert}" for expert in range(EXPERTS)]
    for layer in range(layers):
        of_layer = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        for mlp in mlps:
            of_layer |= {f"{mlp}.{name}_proj": (inner, hidden) for name in ("gate", "up")}
            of_layer[f"{mlp}.down_proj"] = (hidden, inner)
        if moe:
            of_layer |= {"mlp.gate": (EXPERTS, hidden), "self_attn.q_norm": (64,), "self_attn.k_norm": (64,)}
        of_layer |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    tensors = {name: torch.randn(shape).mul_(0.02).to(DTYPES[dtype]) for name, shape in shapes.items()}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def resident(field):
    """Bytes, from /proc/self/status."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def load(source, dtype):
    """In a process of its own: prints what a load takes as JSON."""
    assembly = assemble({"model": {"source": source, "dtype": dtype}})
    assembly.worker.init_device()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, begin, cpu = resident("VmRSS"), time.perf_counter(), time.process_time()
    assembly.worker.load_model()
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    taken = {"seconds": seconds, "cpu": cpu, "peak": resident("VmHWM") - before, "end": resident("VmRSS") - before}
    taken["weights"] = sum(tensor.numel() for _, tensor in assembly.value(LoadedModel).network.weights())
    print(json.dumps(taken))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--load", nargs=2, metavar=("SOURCE", "DTYPE"), help="what the processes are started with")
    options = parser.parse_args()
    if options.load:
        load(*options.load)
        return
    print(f"{'case':32}{'MB':>6}{'seconds':>9}{'CPU s':>7}{'peak':>7}{'after':>7}")
    for case in options.case:
        for stored, dtype in CASES[case]:
            with tempfile.TemporaryDirectory() as folder:
                if case != "gguf":
                    write(Path(folder), case == "moe", stored, options.layers, options.hidden)
                source = "smollm2" if case == "gguf" else folder
                command = [sys.executable, __file__, "--load", source, dtype]
                runs = [json.loads(subprocess.check_output(command, text=True)) for _ in range(options.runs)]
            size = runs[0]["weights"] * DTYPES[dtype].itemsize
            median = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            print(
                f"{case + ' ' + stored + '>' + dtype:32}{size / 1e6:6.0f}{median['seconds']:9.2f}{median['cpu']:7.2f}"
                f"{median['peak'] / size:7.2f}{median['end'] / size:7.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
