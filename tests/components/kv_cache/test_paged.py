"""Planning, allocating and block-wise work on the paged cache."""

import pytest
import torch

from workerkit.components.kv_cache.paged import AscendKVBlockZeroer, PagedKVCache, copy_kv_cache_blocks_inplace
from workerkit.framework.errors import CacheError, IntegrityError, UnsupportedError
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.kv_cache import AttentionLayer
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sections import CacheSection

SHAPE = WorkerShape(max_model_len=50, max_num_reqs=4, max_num_batched_tokens=32, vocab_size=10)


def manager(dtype=torch.float32, **section):
    context = DeviceContext(device=torch.device("cpu"), dtype=dtype)
    return PagedKVCache(CacheSection(**section), SHAPE, context)


def layers_of(*windows, num_kv_heads=2, head_dim=4):
    return [
        AttentionLayer(
            name=f"layers.{index}",
            index=index,
            num_heads=4,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=1.0,
            sliding_window=window,
        )
        for index, window in enumerate(windows)
    ]


def test_equal_layers_share_a_group_and_groups_share_storage():
    cache = manager(block_size=8, num_blocks=20)
    layers = layers_of(None, 16, None, 16, None)
    layout = cache.plan(layers, (4,), 0)
    assert [group.layers for group in layout.groups] == [(0, 2, 4), (1, 3)]
    assert [group.spec.sliding_window for group in layout.groups] == [None, 16]
    assert (layout.num_blocks, layout.kernel_block_size, layout.block_sizes) == (20, 4, (8, 8))
    caches = cache.allocate(layout, layers)
    assert caches.group_of_layer == (0, 1, 0, 1, 0)
    assert len(caches.storages) == 6  # three layers at most, keys and values apart
    assert len({storage.data_ptr() for storage in caches.storages}) == 6
    for views in (caches.keys, caches.values):
        assert {view.shape for view in views} == {(40, 4, 2, 4)}
        assert all(view.is_contiguous() and not view.any() for view in views)
        places = [view.data_ptr() for view in views]
        assert (places[0], places[2]) == (places[1], places[3])
        assert len(set(places)) == 3
    assert caches.keys[0].data_ptr() != caches.values[0].data_ptr()


def test_a_block_costs_the_largest_group():
    cache = manager(block_size=8, memory_bytes=3 * 2 * 8 * 2 * 4 * 4 * 20 + 1)
    assert cache.plan(layers_of(None, 16, None, 16, None), (), 0).num_blocks == 20
    allocated = cache.allocate(cache.plan(layers_of(None), (), 0), layers_of(None))
    assert sum(storage.nbytes for storage in allocated.storages) <= 3 * 2 * 8 * 2 * 4 * 4 * 20 + 1


@pytest.mark.parametrize(
    ("accepted", "right"), [((), 48), ((48, 16), 48), ((32, 16, 8), 16), ((64, 1), 1), ((3, 16), 3)]
)
def test_the_first_accepted_kernel_block_size_is_taken(accepted, right):
    assert manager(block_size=48, num_blocks=9).plan(layers_of(None), accepted, 0).kernel_block_size == right


def test_b121_the_block_size_is_kept_and_the_error_names_all_candidates():
    cache = manager(block_size=24, num_blocks=9)
    layout = cache.plan(layers_of(None), (16, 8), 0)
    assert (layout.block_sizes, layout.kernel_block_size) == ((24,), 8)
    with pytest.raises(CacheError, match=r"block_size 24 .* accepts: 128, 16, 5"):
        cache.plan(layers_of(None), (128, 16, 5), 0)


PAGE = 2 * 8 * 2 * 4 * 2  # bfloat16


@pytest.mark.parametrize(
    ("section", "available", "right"),
    [
        ({"num_blocks": 11, "memory_bytes": 20 * PAGE}, 15 * PAGE, 11),
        ({"memory_bytes": 20 * PAGE}, 15 * PAGE, 20),
        ({}, 15 * PAGE, 15),
        ({}, 10**9, 4 * 7 + 1),  # nobody could use more
        ({"memory_bytes": 10**9}, 0, 4 * 7 + 1),
        ({"num_blocks": 100}, 0, 100),
        ({"num_blocks": 8}, 0, 8),  # 7 for one request of 50 tokens, and block 0
    ],
)
def test_which_number_of_blocks_wins(section, available, right):
    assert manager(torch.bfloat16, block_size=8, **section).plan(layers_of(None), (), available).num_blocks == right


@pytest.mark.parametrize(
    ("section", "available", "names"),
    [
        ({"num_blocks": 7}, 0, ["cache.num_blocks", "7 blocks", "needs 8"]),
        (
            {"memory_bytes": 8 * PAGE - 1},
            10**9,
            [f"cache.memory_bytes = {8 * PAGE - 1}", "needs 8", f"{8 * PAGE} bytes"],
        ),
        ({}, 100, ["100 bytes that are available", "raise cache.memory_fraction or lower model.max_model_len"]),
        ({}, -5, ["0 blocks"]),
    ],
)
def test_one_request_of_full_length_must_fit(section, available, names):
    with pytest.raises(CacheError) as error:
        manager(torch.bfloat16, block_size=8, **section).plan(layers_of(None), (), available)
    assert all(name in str(error.value) for name in names)
    assert "max_model_len = 50" in str(error.value)


def test_every_group_takes_blocks_of_its_own():
    with pytest.raises(CacheError, match="needs 15"):
        manager(block_size=8, num_blocks=14).plan(layers_of(None, 16), (), 0)


def test_groups_of_different_page_sizes_are_refused_by_name():
    wide = layers_of(None, num_kv_heads=4)
    narrow = AttentionLayer(name="odd", index=1, num_heads=4, num_kv_heads=1, head_dim=4, scale=1.0)
    with pytest.raises(UnsupportedError, match=r"layers.0: 1024 bytes, odd: 256 bytes"):
        manager(block_size=8, num_blocks=20).plan([*wide, narrow], (), 0)


def test_groups_of_equal_page_size_and_different_shape_overlay():
    layers = [*layers_of(None, num_kv_heads=2, head_dim=4)]
    layers.append(AttentionLayer(name="b", index=1, num_heads=4, num_kv_heads=1, head_dim=8, scale=1.0))
    cache = manager(block_size=8, num_blocks=20)
    caches = cache.allocate(cache.plan(layers, (4,), 0), layers)
    assert [view.shape for view in caches.keys] == [(40, 4, 2, 4), (40, 4, 1, 8)]
    caches.keys[0][6:8] = 1.0  # manager block 3
    assert caches.keys[1][6:8].eq(1.0).all()
    assert caches.keys[1].sum() == 64


def test_a_model_without_attention_and_a_foreign_layout_are_refused():
    cache = manager(num_blocks=20)
    with pytest.raises(CacheError, match="no attention layer"):
        cache.plan([], (), 0)
    layout = cache.plan(layers_of(None), (), 0)
    with pytest.raises(IntegrityError, match="the model has 2"):
        cache.allocate(layout, layers_of(None, None))


@pytest.fixture
def filled():
    cache = manager(block_size=8, num_blocks=20)
    layers = layers_of(None, 16)
    caches = cache.allocate(cache.plan(layers, (4,), 0), layers)
    for storage in caches.storages:
        storage.copy_(torch.arange(20.0)[:, None].expand_as(storage))
    return cache, caches


def blocks(view):
    """The value of each manager block, which is the same all over it."""
    flat = view.reshape(20, -1)
    assert (flat == flat[:, :1]).all()
    return flat[:, 0].tolist()


def test_zeroing_reaches_whole_manager_blocks_and_nothing_else(filled):
    cache, caches = filled
    cache.zero_blocks(caches, [3, 19])
    right = [0.0 if block in (3, 19) else float(block) for block in range(20)]
    for view in (*caches.keys, *caches.values):
        assert blocks(view) == right
    cache.zero_blocks(caches, [])


def test_zeroing_cleans_nan(filled):
    cache, caches = filled
    caches.keys[0][6:8] = float("nan")
    cache.zero_blocks(caches, [3])
    assert caches.keys[0].isfinite().all()


def test_copies_read_before_they_write(filled):
    cache, caches = filled
    cache.copy_blocks(caches, [(1, 2), (2, 3), (3, 1), (1, 5)])
    right = [float(block) for block in range(20)]
    right[2], right[3], right[1], right[5] = 1.0, 2.0, 3.0, 1.0
    for view in (*caches.keys, *caches.values):
        assert blocks(view) == right
    cache.copy_blocks(caches, [])


def test_a_storage_named_twice_is_copied_once(filled):
    _, caches = filled
    twice = (*caches.storages, caches.storages[0])
    copy_kv_cache_blocks_inplace(twice, [(1, 2), (2, 1)])
    assert blocks(caches.keys[0])[:3] == [0.0, 2.0, 1.0]
    AscendKVBlockZeroer(twice).zero_block_ids([2])
    assert blocks(caches.keys[0])[:3] == [0.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(1, 2), (3, 2)], r"blocks \[2\] are the destination of more than one"),
        ([(1, 20)], r"\[20\] .* 1 to 19"),
        ([(-1, 2)], r"\[-1\]"),
        ([(1, 0)], r"\[0\]"),
    ],
)
def test_bad_copies_change_nothing(filled, pairs, message):
    cache, caches = filled
    with pytest.raises(CacheError, match=message):
        cache.copy_blocks(caches, [(7, 8), *pairs])
    assert blocks(caches.keys[0]) == [float(block) for block in range(20)]


@pytest.mark.parametrize("wrong", [0, 20, -1])
def test_bad_ids_are_not_zeroed(filled, wrong):
    cache, caches = filled
    with pytest.raises(CacheError, match=rf"\[{wrong}\]"):
        cache.zero_blocks(caches, [4, wrong])
    assert blocks(caches.keys[0]) == [float(block) for block in range(20)]
