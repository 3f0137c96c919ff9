"""Native attention, rotary embedding and cache writes against the reference, and bit for bit against themselves."""

import itertools
import random

import pytest
import torch

from workerkit.kernels import reference
from workerkit.kernels.cpu.native.attention import paged_attention, reshape_and_cache, rotary_embedding

DTYPES = [torch.float32, torch.bfloat16]
SCALE = 0.3


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def rand(*size, dtype=torch.float32, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Paged:
    """Sequences of known keys and values over a paged cache, in blocks in random order; all else in it is NaN.

    heads: (query heads, key heads, dim).
    """

    def __init__(self, lengths, heads, dtype, block_size=16, seed=0):
        num_heads, num_kv_heads, dim = heads
        self.heads, self.dtype, self.block_size = heads, dtype, block_size
        self.keys, self.values = (
            [rand(length, num_kv_heads, dim, dtype=dtype, seed=seed + 7 * i + j) for i, length in enumerate(lengths)]
            for j in (1, 2)
        )
        self.queries = [
            rand(length, num_heads, dim, dtype=dtype, seed=seed + 7 * i) for i, length in enumerate(lengths)
        ]
        counts = [-(-length // block_size) for length in lengths]
        ids = list(range(1, sum(counts) + 1))
        random.Random(seed).shuffle(ids)
        shape = (sum(counts) + 1, block_size, num_kv_heads, dim)
        self.caches = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(2)]
        self.tables = torch.full((len(lengths), max(counts)), len(ids), dtype=torch.int32)  # stale: someone's block
        for i, count in enumerate(counts):
            for column in range(count):
                block = self.tables[i, column] = ids.pop()
                for cache, new in zip(self.caches, (self.keys[i], self.values[i]), strict=True):
                    part = new[column * block_size : (column + 1) * block_size]
                    cache[block, : len(part)] = part

    def batch(self, rows, empty=2, padding=3):
        """rows: (sequence, first, end) positions that ask. Empty rows and tokens of no row follow. -> arguments"""
        starts = [0]
        for _, first, end in rows:
            starts.append(starts[-1] + end - first)
        pad = torch.full((padding, *self.queries[0].shape[1:]), float("nan"), dtype=self.dtype)
        query = torch.cat([*(self.queries[i][first:end] for i, first, end in rows), pad])
        tables = torch.cat([self.tables[[i for i, _, _ in rows]], torch.zeros_like(self.tables[:1]).expand(empty, -1)])
        starts = torch.tensor(starts + starts[-1:] * empty, dtype=torch.int32)
        seq_lens = torch.tensor([end for _, _, end in rows] + [0] * empty, dtype=torch.int32)
        return query, *self.caches, tables, starts, seq_lens, SCALE

    def expected(self, rows, window):
        """(result, error that is allowed) in float64. In bfloat16 a weight is off by 2^-8 and 9e-5 for the exponential,
        which moves a result by that much of the distances between values and result; and then it is rounded."""
        results, bounds = [], []
        group = self.heads[0] // self.heads[1]
        for i, first, end in rows:
            query, keys, values = (x.double() for x in (self.queries[i][first:end], self.keys[i], self.values[i]))
            keys, values = (x[:end].repeat_interleave(group, dim=1) for x in (keys, values))
            positions = torch.arange(end)
            seen = positions <= torch.arange(first, end)[:, None]
            if window is not None:
                seen &= positions > torch.arange(first, end)[:, None] - window
            scores = torch.einsum("qnd,snd->nqs", query, keys) * SCALE
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            result = torch.einsum("nqs,snd->qnd", weights, values)
            distances = torch.einsum("nqs,snd->qnd", weights, values.abs()) + result.abs()
            one_weight, rounding = (0.0, 0.0) if self.dtype == torch.float32 else (2**-8 + 9e-5, 2**-8)
            results.append(result)
            bounds.append(1.02 * (one_weight + 1e-5) * distances + rounding * result.abs() + 1e-6)
        return torch.cat(results), torch.cat(bounds)


def check(runtime, paged, rows, window=None):
    got = paged_attention(runtime, *paged.batch(rows), window)
    expected, bound = paged.expected(rows, window)
    count = len(expected)
    assert got.dtype == paged.dtype
    assert ((got[:count].double() - expected).abs() <= bound).all()
    assert torch.equal(got[count:], torch.zeros_like(got[count:])), "tokens of no row are zeros"


MIXED = [700, 1, 64, 65, 150, 1100]
ROWS = [(0, 699, 700), (1, 0, 1), (2, 0, 64), (3, 62, 65), (4, 50, 150), (5, 1095, 1100)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 16), (7, 1, 48), (8, 2, 128), (2, 1, 256), (100, 1, 16)])
@pytest.mark.parametrize("window", [None, 33, 600])
def test_any_mix_of_rows(runtime, dtype, heads, window):
    check(runtime, Paged(MIXED, heads, dtype), ROWS, window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(8))
def test_random_batches(runtime, dtype, seed):
    draw = random.Random(seed)
    lengths = [draw.choice([1, 15, 16, 17, 63, 64, 65, 200, 511, 512, 513, 900]) for _ in range(draw.randint(1, 12))]
    heads = draw.choice([(9, 3, 64), (2, 2, 32), (6, 2, 80), (5, 1, 16), (4, 1, 96)])
    paged = Paged(lengths, heads, dtype, draw.choice([1, 2, 3, 8, 16, 17, 32, 64]), seed)
    rows = []
    for i, length in enumerate(lengths):
        end = draw.randint(1, length)
        rows.append((i, draw.choice([0, end - 1, max(0, end - 5), draw.randrange(end)]), end))
    draw.shuffle(rows)
    check(runtime, paged, rows, draw.choice([None, None, 1, 2, 64, 100]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_threads(runtime, threads, dtype):
    paged = Paged(MIXED, (9, 3, 64), dtype)
    got = paged_attention(runtime, *paged.batch(ROWS), None)
    torch.set_num_threads(3 - threads)
    assert torch.equal(paged_attention(runtime, *paged.batch(ROWS), None), got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_agrees(runtime, dtype):
    paged = Paged(MIXED, (6, 2, 32), dtype)
    arguments = [torch.nan_to_num(x) if x.is_floating_point() else x for x in paged.batch(ROWS)[:-1]]
    tolerance = 2e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(
        paged_attention(runtime, *arguments, SCALE, 100),
        reference.OPS["paged_attention"](*arguments, SCALE, 100),
        atol=tolerance,
        rtol=tolerance,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(9, 3, 64), (2, 2, 80)])
@pytest.mark.parametrize("window", [None, 70, 700])
def test_bits_depend_on_query_and_keys_alone(runtime, dtype, heads, window):
    """Whole prefill, chunks, verification, decodes that share a table, in other company and other blocks."""
    length = 1250
    lengths = [length, 40, 600]

    def run(paged, rows, **sizes):
        return paged_attention(runtime, *paged.batch(rows, **sizes), window)

    paged = Paged(lengths, heads, dtype)
    whole = run(paged, [(0, 0, length)])[:length]
    for block_size in (1, 7, 64):
        assert torch.equal(run(Paged(lengths, heads, dtype, block_size), [(0, 0, length)])[:length], whole)
    cuts = [0, 1, 100, 133, 600, 605, 1249, length]
    for first, end in itertools.pairwise(cuts):
        alone = run(paged, [(0, first, end)], empty=0, padding=0)
        assert torch.equal(alone, whole[first:end])
        company = run(paged, [(1, 39, 40), (0, first, end), (2, 0, 600)])
        assert torch.equal(company[1 : 1 + end - first], whole[first:end])
    decodes = run(paged, [(0, i, i + 1) for i in range(0, length, 9)], empty=5)
    assert torch.equal(decodes[:-3], whole[::9])
    assert torch.equal(run(paged, [(0, 1240, 1241), (1, 0, 40)])[:1], whole[1240:1241])


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_long_rows_find_no_room_to_share_their_splits(runtime, threads, dtype):
    """Whether a row is shared by threads is a matter of memory, not of bits."""
    paged = Paged([4096], (2, 1, 256), dtype, 64)
    alone = paged_attention(runtime, *paged.batch([(0, 4095, 4096)]), None)
    many = paged_attention(runtime, *paged.batch([(0, 4086, 4096)] * 9 + [(0, 4095, 4096)] * 9), None)
    assert torch.equal(many[90:99], alone[:1].expand(9, -1, -1))
    assert torch.equal(many[9], alone[0])


def test_b33_b34_b153_what_is_nobodys_may_be_nan(runtime):
    """Padding tokens, stale table entries, unused slots and keys that the window has left may hold anything."""
    paged = Paged([100, 30], (4, 2, 32), torch.bfloat16, 8)
    rows = [(0, 97, 100), (1, 0, 30)]
    expected = paged_attention(runtime, *paged.batch(rows), 20)
    for cache in paged.caches:
        cache[paged.tables[0, : (97 - 19) // 8]] = float("nan")
    paged.tables[0, : (97 - 19) // 8] = 0
    got = paged_attention(runtime, *paged.batch(rows), 20)
    assert got.isfinite().all()
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_of_a_query_stays_with_it_and_shows(runtime, dtype):
    paged = Paged([100], (4, 2, 32), dtype)
    expected = paged_attention(runtime, *paged.batch([(0, 0, 100)]), None)
    paged.queries[0][41, 2] = float("nan")
    got = paged_attention(runtime, *paged.batch([(0, 0, 100)]), None)
    assert got[41, 2].isnan().all()
    got[41, 2] = expected[41, 2]
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores(runtime, dtype):
    """Softmax of scores in the hundreds, rising and falling along the keys."""
    paged = Paged([700], (3, 1, 16), dtype)
    paged.queries[0] *= 16
    for cache in (paged.keys[0], paged.caches[0]):
        cache *= 4
    got = paged_attention(runtime, *paged.batch([(0, 0, 700)]), None)[:700]
    expected, _ = paged.expected([(0, 0, 700)], None)
    tolerance = 1e-3 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_that_sees_nothing_and_a_batch_of_nothing(runtime, dtype):
    query, keys, values, tables, starts, seq_lens, scale = Paged([5], (2, 1, 16), dtype).batch([(0, 0, 5)], padding=0)
    seq_lens[0] = 3  # the first two of five queries lie before the sequence
    got = paged_attention(runtime, query, keys, values, tables, starts, seq_lens, scale, None)
    assert torch.equal(got[:2], torch.zeros_like(got[:2]))
    assert got[2:].all()
    assert paged_attention(runtime, query[:0], keys, values, tables, starts * 0, seq_lens, scale, None).shape[0] == 0
    none = paged_attention(runtime, query, keys, values, tables, starts * 0, seq_lens, scale, None)
    assert torch.equal(none, torch.zeros_like(none))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_recorded_once_serves_every_batch(runtime, threads, dtype):
    """Rotation, cache write and attention on views of a merged projection; tables are read when the program runs."""
    num_heads, num_kv_heads, dim = 6, 2, 32
    max_tokens, max_rows, width = 300, 8, 90
    sizes = [num_heads * dim, num_kv_heads * dim, num_kv_heads * dim]
    merged = torch.zeros(max_tokens, sum(sizes), dtype=dtype)
    cos, sin = (torch.zeros(max_tokens, 12, dtype=dtype) for _ in range(2))
    slots = torch.zeros(max_tokens, dtype=torch.int64)
    tables, starts, seq_lens = (torch.zeros(*size, dtype=torch.int32) for size in ((8, width), (9,), (8,)))
    caches = [torch.zeros(200, 8, num_kv_heads, dim, dtype=dtype) for _ in range(2)]

    def native(op, *args):
        return op(runtime, *args)

    def plain(op, *args):
        return reference.OPS[op.__name__](*args)

    def step(run, tokens, merged, caches):
        query, key, value = (x.view(tokens, -1, dim) for x in merged[:tokens].split(sizes, dim=1))
        query, key = run(rotary_embedding, query, key, cos[:tokens], sin[:tokens])
        run(reshape_and_cache, key, value, *caches, slots[:tokens])
        return run(paged_attention, query, *caches, tables, starts, seq_lens, SCALE, None)

    program, result = runtime.record(lambda: step(native, 2, merged, caches), 2, max_tokens)
    lengths = [0] * max_rows
    ids = list(range(1, 200))
    draw = random.Random(3)
    others = {run: [cache.clone() for cache in caches] for run in (native, plain)}
    for number, queries in enumerate([[200], [1, 20, 3], [1, 1, 1], [1, 5, 200, 0, 0, 60], [1] * 8]):
        slots.fill_(-1)
        starts.fill_(sum(queries))
        token = 0
        for row, count in enumerate(queries):
            starts[row] = token
            for position in range(lengths[row], lengths[row] + count):
                if position % 8 == 0:
                    tables[row, position // 8] = ids.pop(draw.randrange(len(ids)))
                slots[token] = int(tables[row, position // 8]) * 8 + position % 8
                token += 1
            lengths[row] += count
            seq_lens[row] = lengths[row]
        tokens = token + 3
        merged[:tokens] = rand(tokens, sum(sizes), dtype=dtype, seed=number)
        cos[:tokens], sin[:tokens] = (rand(tokens, 12, seed=number + i).to(dtype) for i in (10, 20))
        at_once, expected = (step(run, tokens, merged.clone(), others[run])[:token] for run in (native, plain))
        program.run(tokens)
        assert torch.equal(result[:token], at_once)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(caches, others[native], strict=True))
        assert torch.equal(result[token:tokens], torch.zeros_like(result[token:tokens]))
        tolerance = 1e-5 if dtype == torch.float32 else 0.1  # whose rotation is rounded three times
        torch.testing.assert_close(at_once, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "half"), [(64, 32), (48, 8), (80, 20), (6, 3), (128, 64)])
def test_rotation_in_place(runtime, dtype, dim, half):
    merged = rand(5, 7 * dim, dtype=dtype)
    before = merged.clone()
    query, key = merged[:, : 4 * dim].view(5, 4, dim), merged[:, 4 * dim : 6 * dim].view(5, 2, dim)
    cos, sin = rand(5, half, dtype=dtype, seed=1), rand(5, half, dtype=dtype, seed=2)
    rotated = reference.OPS["rotary_embedding"](query.float(), key.float(), cos.float(), sin.float())
    got = rotary_embedding(runtime, query, key, cos, sin)
    assert got[0] is query
    assert got[1] is key
    for ours, theirs in zip(got, rotated, strict=True):
        assert torch.equal(ours, theirs.to(dtype))
    assert torch.equal(merged[:, 6 * dim :], before[:, 6 * dim :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_writes_land_in_their_slots_only(runtime, dtype, slot_dtype):
    caches = [rand(5, 4, 2, 3, dtype=dtype, seed=i) for i in range(2)]
    expected = [cache.clone() for cache in caches]
    merged = rand(6, 3 * 6, dtype=dtype)
    merged[[2, 4]] = float("nan")  # B33: padding
    key, value = merged[:, 6:12].view(6, 2, 3), merged[:, 12:].view(6, 2, 3)
    slots = torch.tensor([4, 19, -1, 7, -1, 0], dtype=slot_dtype)
    reshape_and_cache(runtime, key, value, *caches, slots)
    reference.OPS["reshape_and_cache"](key, value, *expected, slots)
    assert all(
        torch.equal(ours, theirs) and ours.isfinite().all() for ours, theirs in zip(caches, expected, strict=True)
    )


def test_caches_that_are_a_part_of_each_block(runtime):
    """Blocks may lie apart, as where keys and values share one storage."""
    paged = Paged([70], (4, 2, 32), torch.float32)
    expected = paged_attention(runtime, *paged.batch([(0, 60, 70)]), None)
    both = torch.stack(paged.caches, dim=1)
    paged.caches = [both[:, 0], both[:, 1]]
    assert torch.equal(paged_attention(runtime, *paged.batch([(0, 60, 70)]), None), expected)
    new = rand(1, 2, 32)
    reshape_and_cache(runtime, new, -new, *paged.caches, torch.tensor([17]))
    assert torch.equal(both[1, :, 1], torch.cat([new, -new]))


def test_what_is_not_offered_is_refused_by_name(runtime):
    def refused(error, match, heads=(4, 2, 32), dtype=torch.float32, window=None, **changes):
        query, keys, values, tables, starts, seq_lens, scale = Paged([5], heads, torch.float32).batch([(0, 0, 5)])
        named = {"query": query.to(dtype), "keys": keys.to(dtype), "values": values.to(dtype), "tables": tables}
        named |= {"starts": starts, "seq_lens": seq_lens} | changes
        with pytest.raises(error, match=match):
            paged_attention(runtime, *named.values(), scale, window)

    refused(NotImplementedError, "head_dim 40", heads=(4, 2, 40))
    refused(NotImplementedError, "head_dim 272", heads=(4, 2, 272))
    refused(NotImplementedError, "query is torch.float16", dtype=torch.float16)
    refused(NotImplementedError, "key_cache is torch.bfloat16", keys=torch.zeros(2, 16, 2, 32, dtype=torch.bfloat16))
    refused(ValueError, "key_cache has strides", keys=torch.zeros(2, 2, 16, 32).transpose(1, 2))
    refused(ValueError, "4 query heads are no multiple of 3", heads=(4, 3, 32))
    refused(ValueError, "sliding_window 0", window=0)
    refused(TypeError, "block_table is torch.int64", tables=torch.zeros(3, 1, dtype=torch.int64))
    x, slots = rand(2, 2, 16), torch.tensor([0.0, 1.0])
    with pytest.raises(TypeError, match=r"slot_mapping is torch\.float32"):
        reshape_and_cache(runtime, x, x, rand(2, 4, 2, 16), rand(2, 4, 2, 16), slots)
    with pytest.raises(ValueError, match="key has strides"):
        rotary_embedding(runtime, x, rand(2, 16, 2).transpose(1, 2), rand(2, 8), rand(2, 8))
