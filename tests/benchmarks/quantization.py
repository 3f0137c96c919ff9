"""What quantised weights do to the logits of SmolLM2-135M, and to its memory.

    python tests/benchmarks/quantization.py [--positions 256] [--kernels auto]

Every configuration reads the same real text, without a cache, and is compared with the dequantised model in float32:
errors of the logits in standard deviations of the float32 logits of that position, how often the likeliest token is the
same, and the mean Kullback-Leibler divergence of the distributions.
"""

import argparse
import gc
import sys
from pathlib import Path

import torch

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.interfaces.model import LoadedModel

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

from oracles import dense_logits
from real_prompts import real_prompts

CASES = {
    "none": "none",
    "keep": "keep",
    "int8": "int8",
    "w8a8": "w8a8",
    "w8a8, head int8": {"default": "w8a8", "head": "int8"},
}


def run(dtype, quantization, kernels, positions):
    """(logits [positions, V], bytes of weights)."""
    config = {
        "model": {"source": "smollm2", "dtype": dtype, "quantization": quantization},
        "components": {"kernels": kernels},
    }
    with assemble(config) as assembly:
        assembly.worker.init_device()
        assembly.worker.load_model()
        loaded, tokenizer = assembly.value(LoadedModel), assembly.get(roles.TOKENIZER)
        token_ids = tokenizer.encode(" ".join(real_prompts()))[:positions]
        return dense_logits(loaded.network, token_ids), loaded.weight_bytes


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--positions", type=int, default=256)
    parser.add_argument("--kernels", default="auto", help="auto, or libraries by comma")
    options = parser.parse_args()
    kernels = "auto" if options.kernels == "auto" else options.kernels.split(",")
    exact, _ = run("float32", "none", kernels, options.positions)
    log_probs = exact.log_softmax(-1)
    print(f"{'dtype':10}{'quantization':18}{'MB':>6}{'mean':>9}{'max':>8}{'top-1':>8}{'KL':>9}")
    for dtype in ("float32", "bfloat16"):
        for name, quantization in CASES.items():
            logits, weight_bytes = run(dtype, quantization, kernels, options.positions)
            errors = (logits - exact).abs() / exact.std(dim=-1, keepdim=True)
            same = (logits.argmax(-1) == exact.argmax(-1)).double().mean()
            divergence = torch.nn.functional.kl_div(logits.log_softmax(-1), log_probs, log_target=True, reduction="sum")
            print(
                f"{dtype:10}{name:18}{weight_bytes / 1e6:6.0f}{errors.mean():9.4f}{errors.max():8.3f}{same:8.1%}"
                f"{divergence / len(exact):9.5f}",
                flush=True,
            )
            gc.collect()


if __name__ == "__main__":
    main()
