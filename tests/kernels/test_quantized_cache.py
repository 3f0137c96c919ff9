"""Keys and values in 8 bits: what is written, and what is read back."""

import torch

from workerkit.kernels import reference

WRITE, READ = reference.OPS["quantize_and_cache"], reference.OPS["dequantize_blocks"]


def empty(blocks=6, block_size=4, heads=3, dim=8):
    codes = [torch.zeros(blocks, block_size, heads, dim, dtype=torch.int8) for _ in range(2)]
    scales = [torch.zeros(blocks, block_size, heads) for _ in range(2)]
    return (*codes, *scales)


def tokens(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    sizes = torch.logspace(-6, 3, count)[:, None, None]
    return [(torch.randn(count, 3, 8, generator=generator) * sizes).to(dtype) for _ in range(2)]


def everything(cache, dtype=torch.float32):
    """Keys and values of all slots."""
    keys, values, key_scales, value_scales = cache
    blocks = torch.arange(len(keys), dtype=torch.int32)
    pairs = ((keys, key_scales), (values, value_scales))
    return [READ(codes, scales, blocks, dtype).flatten(0, 1) for codes, scales in pairs]


def test_each_head_of_a_token_is_rounded_to_a_127th_of_its_largest_element():
    cache, slots = empty(), torch.tensor([9, 3, 22, 1, 8, 17], dtype=torch.int32)
    written = tokens(6)
    WRITE(*written, *cache, slots)
    for new, found in zip(written, everything(cache), strict=True):
        step = new.abs().amax(-1, keepdim=True) / 127
        assert ((found[slots.long()] - new).abs() <= 0.501 * step).all()
        rest = torch.ones(24, dtype=torch.bool)
        rest[slots.long()] = False
        assert not found[rest].any()
    assert cache[0].abs().amax(-1).flatten()[slots.long() * 3].eq(127).all(), "the scale is no larger than it must be"


def test_heads_of_zeros_and_of_tiny_numbers():
    cache = empty()
    key, value = torch.zeros(1, 3, 8), torch.full((1, 3, 8), 1e-44)
    WRITE(key, value, *cache, torch.tensor([5]))
    keys, values = everything(cache)
    assert not keys.any()
    assert values.isfinite().all()
    assert values.max() <= 1e-43


def test_b33_nan_in_padding_rows_is_never_written():
    cache = empty()
    key, value = tokens(5)
    key[3:], value[3:] = float("nan"), float("nan")
    WRITE(key, value, *cache, torch.tensor([4, 5, 6, -1, -1], dtype=torch.int32))
    for found in everything(cache):
        assert found.isfinite().all()
        assert found.flatten(1).any(1).nonzero().flatten().tolist() == [4, 5, 6]
    before = [part.clone() for part in cache]
    WRITE(key, value, *cache, torch.full((5,), -1, dtype=torch.int32))
    WRITE(key[:0], value[:0], *cache, torch.tensor([], dtype=torch.int32))
    assert all(map(torch.equal, cache, before))


def test_a_token_is_rounded_the_same_in_any_company():
    together, one_by_one = empty(), empty()
    key, value = tokens(6, torch.bfloat16)
    WRITE(key, value, *together, torch.arange(6))
    for token in range(6):
        WRITE(key[token : token + 1], value[token : token + 1], *one_by_one, torch.tensor([token]))
    assert all(map(torch.equal, together, one_by_one))


def test_blocks_are_read_as_they_are_named():
    cache = empty()
    WRITE(*tokens(24), *cache, torch.arange(24))
    keys, _ = everything(cache)
    named = READ(cache[0], cache[2], torch.tensor([3, 0, 3], dtype=torch.int32), torch.bfloat16)
    assert named.shape == (3, 4, 3, 8)
    assert torch.equal(named, keys.view(6, 4, 3, 8)[[3, 0, 3]].bfloat16())
