"""Paged attention of the native library beside what bounds it: ratios within one run.

    python tests/benchmarks/attention.py [--runs 15]

Decode: beside the time to read all keys and values once, from one end to the other. Layers take turns, so that they
come from memory and not from a cache; blocks are in random order. Prefill: beside torch's scaled_dot_product_attention
on contiguous tensors, with the key heads repeated as it needs them (not timed). 9 heads, 3 key heads of 64, blocks of
16. Contestants alternate; the table shows the least time of each, which is what other processes disturb least.
"""

import argparse
import time
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from workerkit.kernels.cpu.native.attention import paged_attention
from workerkit.kernels.cpu.native.runtime import Runtime

HEADS, KV_HEADS, DIM, BLOCK = 9, 3, 64, 16


class Batch:
    """Rows of `length` keys, the last `queries` of each asking."""

    def __init__(self, rows, length, queries, dtype, layers):
        blocks = rows * length // BLOCK
        shape = (layers, 2, blocks + 1, BLOCK, KV_HEADS, DIM)
        self.caches = torch.randn(shape).to(dtype)
        self.table = (torch.randperm(blocks) + 1).view(rows, -1).int()
        self.starts = torch.arange(0, rows * queries + 1, queries).int()
        self.seq_lens = torch.full((rows,), length).int()
        self.query = torch.randn(rows * queries, HEADS, DIM).to(dtype)
        self.rows, self.length, self.queries = rows, length, queries

    def attend(self, runtime, layer=0):
        """A function that attends as a worker's steps do, from a recorded program."""
        rest = self.table, self.starts, self.seq_lens, DIM**-0.5, None
        tokens = len(self.query)
        program, _ = runtime.record(
            lambda: paged_attention(runtime, self.query, *self.caches[layer], *rest), tokens, tokens
        )
        return lambda: program.run(tokens)

    def read(self, layer=0):
        return self.caches[layer].view(torch.int64).sum()

    def sdpa(self):
        """A function that computes the same as `attend`, over contiguous tensors."""
        keys, values = (
            cache[self.table.long()].view(self.rows, self.length, KV_HEADS, DIM).transpose(1, 2)
            for cache in self.caches[0]
        )
        keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1).contiguous() for x in (keys, values))
        query = self.query.view(self.rows, self.queries, HEADS, DIM).transpose(1, 2).contiguous()
        if self.queries == self.length:
            return lambda: scaled_dot_product_attention(query, keys, values, is_causal=True)
        mask = torch.ones(self.queries, self.length, dtype=torch.bool).tril(self.length - self.queries)
        return lambda: scaled_dot_product_attention(query, keys, values, attn_mask=mask)


def least(runs, *contestants):
    """Of each contestant, functions that take turns: the least seconds of one of them."""
    best = [float("inf")] * len(contestants)
    for _ in range(runs):
        for number, functions in enumerate(contestants):
            for function in functions:
                begin = time.perf_counter()
                function()
                best[number] = min(best[number], time.perf_counter() - begin)
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    runtime = Runtime()
    runtime.load()
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}; ms, least of {runs} runs")
    print(f"{'':46} {'native':>8} {'other':>8} {'ratio':>6}")
    for dtype in (torch.bfloat16, torch.float32):
        for rows, length, layers in ((32, 512, 12), (1, 8192, 24)):
            batch = Batch(rows, length, 1, dtype, layers)
            ours, read = least(
                runs,
                [batch.attend(runtime, layer) for layer in range(layers)],
                [partial(batch.read, layer) for layer in range(layers)],
            )
            line(f"decode {rows} x {length} / read, {batch.caches[0].nbytes / read / 1e9:.0f} GB/s", dtype, ours, read)
        for rows, length, queries in ((1, 512, 512), (8, 512, 512), (1, 2304, 256)):
            batch = Batch(rows, length, queries, dtype, 1)
            ours, theirs = least(runs, [batch.attend(runtime)], [batch.sdpa()])
            line(f"prefill {rows} x {queries} of {length} / sdpa", dtype, ours, theirs)


def line(what, dtype, ours, other):
    name = str(dtype).removeprefix("torch.")
    print(f"{what:36} {name:9} {1e3 * ours:8.3f} {1e3 * other:8.3f} {ours / other:6.2f}")


if __name__ == "__main__":
    main()
