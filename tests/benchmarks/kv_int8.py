"""What keys and values in 8 bits do to the logits of SmolLM2-135M, and to the size of its cache.

    python tests/benchmarks/kv_int8.py [--prompts 4] [--length 200] [--tokens 64] [--dtype float32]

The model continues each prompt greedily with keys and values in model.dtype. Every other row reads the same tokens with
some layers in int8, and its logits are compared at each new position: the mean and the largest absolute difference, the
mean in standard deviations of the position's logits, the mean Kullback-Leibler divergence, and how often the likeliest
token is the same. `alone`: how many tokens are the same when it goes on by itself, before the first other one.
"""

import argparse
import sys
from pathlib import Path

import torch

from workerkit.framework import roles
from workerkit.framework.assembly import assemble
from workerkit.framework.interfaces.engine import EngineRequest
from workerkit.framework.interfaces.sampling_params import SamplingParams

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

from hf_oracle import Recording

CASES = {
    "none": "none",
    "all layers": "int8",
    "layers 0-14": {"layers": {"0-14": "int8"}},
    "layers 15-29": {"layers": {"15-29": "int8"}},
}


class Forced(Recording):
    """Draws tokens that are given, and keeps the logits; the likeliest where none are given."""

    def __init__(self, given):
        super().__init__()
        self.given = given  # by request
        self.batch = None

    def process(self, logits, batch):
        self.batch = batch
        return super().process(logits, batch)

    def draw(self, logits, batch):
        tokens = logits.argmax(-1)
        for row, req_id in enumerate(batch.req_ids):
            if (done := len(self.rows.get(req_id, ()))) and req_id in self.given:
                tokens[row] = self.given[req_id][done - 1]
        return tokens


def run(options, quantization, given=None):
    """({request: tokens}, logits [prompts * tokens, V], bytes of a token's keys and values)."""
    config = {
        "model": {"source": "smollm2", "dtype": options.dtype, "max_model_len": options.length + options.tokens},
        "limits": {"max_num_reqs": options.prompts, "max_num_batched_tokens": 512},
        "cache": {"quantization": quantization, "num_blocks": 1000},
    }
    text = " ".join((Path(__file__).resolve().parents[2] / "LICENSE").read_text().split())
    sampler = Forced(given or {})
    with assemble(config) as assembly, assembly.with_override(roles.SAMPLER, sampler) as other:
        worker = other.worker
        worker.start()
        scheduler, tokenizer = other.get(roles.SCHEDULER), other.get(roles.TOKENIZER)
        known = tokenizer.encode(text)
        params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
        prompts = {str(i): tuple(known[200 * i : 200 * i + options.length]) for i in range(options.prompts)}
        for req_id, prompt in prompts.items():
            scheduler.add(EngineRequest(req_id=req_id, prompt_token_ids=prompt, params=params))
        tokens = {req_id: [] for req_id in prompts}
        while scheduler.has_work:
            output = scheduler.schedule()
            answer = worker.execute_model(output) or worker.sample_tokens().get()
            for req_id, progress in scheduler.update(output, answer).items():
                tokens[req_id].extend(progress.token_ids)
        layout = worker.layout
    size = sum(
        group.spec.page_bytes * len(group.layers) / group.spec.block_size for group in layout.groups
    )  # of a token in all layers
    return tokens, torch.cat([torch.stack(sampler.rows[req_id]) for req_id in prompts]).float(), size


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    given, exact, _ = run(options, "none")
    log_probs, spread = exact.log_softmax(-1), exact.std(dim=-1, keepdim=True)
    print(f"{'int8':14}{'B/token':>8}{'mean':>9}{'max':>8}{'mean/std':>10}{'KL':>10}{'top-1':>8}{'alone':>8}")
    for name, quantization in CASES.items():
        _, logits, size = run(options, quantization, given)
        alone, _, _ = run(options, quantization)
        errors = (logits - exact).abs()
        same = (logits.argmax(-1) == exact.argmax(-1)).double().mean()
        divergence = torch.nn.functional.kl_div(logits.log_softmax(-1), log_probs, log_target=True, reduction="sum")
        prefixes = [
            next((i for i, (a, b) in enumerate(zip(alone[r], given[r], strict=True)) if a != b), options.tokens)
            for r in given
        ]
        print(
            f"{name:14}{size:8.0f}{errors.mean():9.4f}{errors.max():8.3f}{(errors / spread).mean():10.4f}"
            f"{divergence / len(exact):10.6f}{same:8.1%}{sum(prefixes) / len(prefixes):8.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
