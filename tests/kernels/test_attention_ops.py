"""Cache writes and attention: the reference against a dense computation, the CPU library against the reference."""

import pytest
import torch

from workerkit.kernels import cpu, reference

WRITE = {"reference": reference.OPS["reshape_and_cache"], "cpu": cpu.OPS["reshape_and_cache"]}
DTYPES = {torch.float32: {"atol": 2e-6, "rtol": 1e-5}, torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2}}
HEADS = [(4, 4), (6, 2), (9, 3), (5, 1)]


@pytest.fixture(params=WRITE)
def reshape_and_cache(request):
    return WRITE[request.param]


class Paged:
    """Rows of known keys and values, scattered over a paged cache by hand."""

    def __init__(self, seq_lens, heads, dtype=torch.float32, block_size=4, head_dim=8, value_dim=8):
        generator = torch.Generator().manual_seed(1)
        self.num_heads, self.num_kv_heads = heads
        self.head_dim = head_dim
        width = max(-(-length // block_size) for length in seq_lens)
        blocks = torch.randperm(len(seq_lens) * width, generator=generator) + 1
        self.block_table = torch.zeros(len(seq_lens), width, dtype=torch.int32)
        shape = (len(seq_lens) * width + 1, block_size, self.num_kv_heads)
        self.key_cache, self.value_cache = (
            torch.randn(*shape, dim, generator=generator).to(dtype) for dim in (head_dim, value_dim)
        )
        self.rows = []
        for row, length in enumerate(seq_lens):
            own = -(-length // block_size)
            self.block_table[row, :own] = blocks[row * width : row * width + own]
            slots = [int(self.block_table[row, i // block_size]) * block_size + i % block_size for i in range(length)]
            self.rows.append(tuple(cache.flatten(0, 1)[slots].clone() for cache in (self.key_cache, self.value_cache)))

    def queries(self, count, dtype=torch.float32):
        return torch.randn(count, self.num_heads, self.head_dim, generator=torch.Generator().manual_seed(2)).to(dtype)

    def sinks(self):
        return 2 * torch.randn(self.num_heads, generator=torch.Generator().manual_seed(3))

    def dense(self, row, query, scale, window=None, sinks=None, softcap=None):
        """Position by position, head by head, in float64."""
        keys, values = (tensor.double() for tensor in self.rows[row])
        result = torch.zeros(*query.shape[:2], values.shape[-1], dtype=torch.float64)
        group = self.num_heads // self.num_kv_heads
        for i in range(query.shape[0]):
            position = keys.shape[0] - query.shape[0] + i
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(self.num_heads):
                seen = slice(first, position + 1)
                scores = scale * keys[seen, head // group] @ query[i, head].double()
                weights = (scores if softcap is None else softcap * (scores / softcap).tanh()).exp()
                weights /= weights.sum() + (0 if sinks is None else sinks[head].double().exp())
                result[i, head] = weights @ values[seen, head // group]
        return result.to(query.dtype)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
def test_reference_paged_attention_is_softmax_attention(heads, window):
    lengths, query_lens = [9, 1, 6, 13], [2, 1, 6, 1]
    paged = Paged(lengths, heads)
    query = paged.queries(sum(query_lens) + 2)  # two padding tokens
    starts = torch.tensor([0, 2, 3, 9, 10, 10])
    table = torch.cat((paged.block_table, torch.zeros_like(paged.block_table[:1])))
    got = reference.OPS["paged_attention"](
        query, paged.key_cache, paged.value_cache, table, starts, torch.tensor([*lengths, 0]), 0.3, window
    )
    for row in range(4):
        own = slice(int(starts[row]), int(starts[row + 1]))
        torch.testing.assert_close(got[own], paged.dense(row, query[own], 0.3, window), atol=1e-5, rtol=1e-5)
    assert torch.equal(got[10:], torch.zeros_like(got[10:]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 1, 3, 5, 8, 100])
@pytest.mark.parametrize(("seq_len", "num_queries"), [(1, 1), (9, 9), (13, 4), (13, 1), (16, 5), (17, 17)])
def test_cpu_prefill_attention(dtype, heads, window, seq_len, num_queries):
    paged = Paged([seq_len], heads, dtype)
    query = paged.queries(num_queries, dtype)
    arguments = (query, paged.key_cache, paged.value_cache, paged.block_table[0], seq_len, 0.4, window)
    expected = reference.OPS["prefill_attention"](*arguments)
    got = cpu.OPS["prefill_attention"](*arguments)
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, **DTYPES[dtype])
    if dtype == torch.float32:
        torch.testing.assert_close(expected, paged.dense(0, query, 0.4, window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 1, 4, 7])
def test_cpu_decode_attention(dtype, heads, window):
    lengths = [9, 1, 6, 13, 16]
    paged = Paged(lengths, heads, dtype)
    query = paged.queries(len(lengths), dtype)
    positions = torch.arange(paged.block_table.shape[1] * 4)
    seq_lens = torch.tensor(lengths)[:, None]
    mask = (positions < seq_lens) & (positions >= seq_lens - (window or 100))
    arguments = (query, paged.key_cache, paged.value_cache, paged.block_table, mask, 0.4)
    expected = reference.OPS["decode_attention"](*arguments)
    got = cpu.OPS["decode_attention"](*arguments)
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, **DTYPES[dtype])
    for row in range(len(lengths)):
        torch.testing.assert_close(
            got[row : row + 1], paged.dense(row, query[row : row + 1], 0.4, window), **DTYPES[dtype]
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value_dim", [5, 8, 12])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 0.8])
def test_sinks_soft_caps_and_values_of_another_size_than_keys(dtype, value_dim, has_sinks, window, softcap):
    lengths, query_lens = [9, 1, 13, 16, 2], [9, 1, 5, 1, 1]
    paged = Paged(lengths, (6, 2), dtype, value_dim=value_dim)
    caches, sinks = (paged.key_cache, paged.value_cache), paged.sinks() if has_sinks else None
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    query = paged.queries(sum(query_lens), dtype)
    expected = reference.OPS["paged_attention"](
        query, *caches, paged.block_table, starts, torch.tensor(lengths), 0.4, window, sinks, softcap
    )
    assert expected.shape == (*query.shape[:2], value_dim)
    for row, length in enumerate(lengths):
        own = slice(int(starts[row]), int(starts[row + 1]))
        dense = paged.dense(row, query[own], 0.4, window, sinks, softcap)
        torch.testing.assert_close(expected[own], dense, **DTYPES[dtype])
        got = cpu.OPS["prefill_attention"](
            query[own], *caches, paged.block_table[row], length, 0.4, window, sinks, softcap
        )
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected[own], **DTYPES[dtype])
    last, seq_lens = query[starts[1:] - 1], torch.tensor(lengths)[:, None]
    positions = torch.arange(paged.block_table.shape[1] * 4)
    mask = (positions < seq_lens) & (positions >= seq_lens - (window or 100))
    for library in (reference, cpu):
        got = library.OPS["decode_attention"](last, *caches, paged.block_table, mask, 0.4, sinks, softcap)
        torch.testing.assert_close(got, expected[starts[1:] - 1], **DTYPES[dtype])


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [None, torch.ones(4)], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("library", [reference, cpu], ids=["reference", "cpu"])
def test_a_row_that_sees_nothing_yields_zeros(library, sinks, softcap):
    paged = Paged([5, 5], (4, 2))
    mask = torch.zeros(2, 8, dtype=torch.bool)
    mask[0, :5] = True
    got = library.OPS["decode_attention"](
        paged.queries(2), paged.key_cache, paged.value_cache, paged.block_table, mask, 0.4, sinks, softcap
    )
    assert got.isfinite().all()
    assert torch.equal(got[1], torch.zeros_like(got[1]))


@pytest.mark.parametrize("library", [reference, cpu], ids=["reference", "cpu"])
def test_a_cache_of_another_dtype(library):
    """A group may keep its keys in a type of its own."""
    paged = Paged([7], (4, 2), torch.bfloat16)
    query = paged.queries(3)
    keys = [cache.float() for cache in (paged.key_cache, paged.value_cache)]
    table = paged.block_table
    expected = library.OPS["prefill_attention"](query, *keys, table[0], 7, 0.4, None)
    got = library.OPS["prefill_attention"](query, paged.key_cache, paged.value_cache, table[0], 7, 0.4, None)
    torch.testing.assert_close(got, expected)
    mask = torch.ones(1, 8, dtype=torch.bool)
    expected = library.OPS["decode_attention"](query[:1], *keys, table, mask, 0.4)
    got = library.OPS["decode_attention"](query[:1], paged.key_cache, paged.value_cache, table, mask, 0.4)
    torch.testing.assert_close(got, expected)


def test_writes_land_in_their_slots_only(reshape_and_cache):
    cache = [torch.zeros(5, 4, 2, 3) for _ in range(2)]
    qkv = torch.randn(6, 3 * 6)  # keys and values are strided views in real life
    key, value = qkv[:, 6:12].view(6, 2, 3), qkv[:, 12:].view(6, 2, 3)
    slots = torch.tensor([4, 19, -1, 7, -1, 0], dtype=torch.int32)
    reshape_and_cache(key, value, *cache, slots)
    for new, written in zip((key, value), cache, strict=True):
        expected = torch.zeros(20, 2, 3)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot] = new[token]
        assert torch.equal(written.flatten(0, 1), expected)


def test_writes_convert_to_the_caches_type_and_take_no_tokens(reshape_and_cache):
    cache = [torch.zeros(2, 4, 1, 3, dtype=torch.bfloat16) for _ in range(2)]
    key = torch.randn(2, 1, 3)
    reshape_and_cache(key, key, *cache, torch.tensor([1, 5]))
    assert torch.equal(cache[0].flatten(0, 1)[[1, 5]], key.bfloat16())
    before = cache[0].clone()
    reshape_and_cache(key[:0], key[:0], *cache, torch.tensor([], dtype=torch.int32))
    reshape_and_cache(key, key, *cache, torch.tensor([-1, -1], dtype=torch.int32))
    assert torch.equal(cache[0], before)


def test_b33_nan_in_padding_rows_never_reaches_the_cache(reshape_and_cache):
    cache = [torch.zeros(3, 4, 2, 3) for _ in range(2)]
    key = torch.randn(5, 2, 3)
    key[3:] = float("nan")
    reshape_and_cache(key, key, *cache, torch.tensor([4, 5, 6, -1, -1], dtype=torch.int32))
    assert all(tensor.isfinite().all() for tensor in cache)
    assert all(torch.equal(tensor[0], torch.zeros(4, 2, 3)) for tensor in cache)
