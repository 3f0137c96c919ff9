"""Planning, allocating and block-wise work on the paged cache."""

import pytest
import torch

from workerkit.components.kv_cache.groups import group_size
from workerkit.components.kv_cache.paged import AscendKVBlockZeroer, PagedKVCache, copy_kv_cache_blocks_inplace
from workerkit.framework.errors import CacheError, IntegrityError, UnsupportedError
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.kv_cache import AttentionLayer
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sections import CacheQuantization, CacheSection

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


def layer_of(index, num_kv_heads, head_dim, **fields):
    return AttentionLayer(
        name=f"layers.{index}",
        index=index,
        num_heads=4,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=1.0,
        **fields,
    )


def test_smaller_pages_hold_more_tokens_while_they_fit():
    layers = [layer_of(0, 4, 4), layer_of(1, 1, 4), layer_of(2, 3, 4), layer_of(3, 2, 4)]  # 16, 4, 12 and 8 elements
    cache = manager(block_size=8, num_blocks=30)
    layout = cache.plan(layers, (4,), 0)
    assert layout.block_sizes == (8, 32, 8, 16)
    # A page is the least multiple of 16, 4, 12 and 8 elements times 4 tokens that holds 8 tokens of 16.
    assert layout.strides == (3, 12, 4, 6)
    assert layout.block_bytes == 2 * 4 * 4 * 48
    caches = cache.allocate(layout, layers)
    assert [view.shape for view in caches.keys] == [(90, 4, 4, 4), (360, 4, 1, 4), (120, 4, 3, 4), (180, 4, 2, 4)]
    assert all(view.is_contiguous() for view in (*caches.keys, *caches.values))
    assert sum(storage.nbytes for storage in caches.storages) == 30 * layout.block_bytes
    # Block 7 of any group lies within page 7, however many kernel blocks that is.
    for index, (stride, size) in enumerate(zip(layout.strides, layout.block_sizes, strict=True)):
        caches.keys[index][7 * stride : 7 * stride + size // 4] = 1.0
        (storage,) = {view for view in caches.storages if view.data_ptr() == caches.keys[index].data_ptr()}
        assert storage.any(1).nonzero().flatten().tolist() == [7]
        cache.zero_blocks(caches, [7])
        assert not caches.keys[index].any()


def test_pages_without_a_good_common_size_are_refused_by_name():
    layers = [layer_of(0, 1, 13), layer_of(1, 1, 11)]
    with pytest.raises(UnsupportedError, match=r"be 4576 bytes large .*layers.0: 416 bytes, layers.1: 352 bytes"):
        manager(block_size=8, num_blocks=20).plan(layers, (8,), 0)
    # With kernel blocks of one token 572 bytes are enough.
    layout = manager(block_size=8, num_blocks=20).plan(layers, (), 0)
    assert (layout.kernel_block_size, layout.strides, layout.block_bytes) == (1, (11, 13), 2 * 572)


@pytest.mark.parametrize(
    ("counts", "right"),
    [
        ((5,), 5),
        ((3, 2), 3),
        ((22, 4), 4),
        ((18, 18), 18),
        ((32, 1), 32),
        ((30, 1), 30),
        ((30, 1, 1), 30),
        ((12, 6, 4), 6),
        ((1, 2, 9), 2),
    ],
)
def test_how_many_layers_a_group_has(counts, right):
    assert group_size(counts) == right


def test_a_kind_of_many_layers_makes_groups_of_few():
    layers = layers_of(*[16] * 3, None, *[16] * 3, None)
    layout = manager(block_size=8, num_blocks=100).plan(layers, (), 0)
    assert [group.layers for group in layout.groups] == [(0, 1), (2, 4), (5, 6), (3, 7)]
    assert [group.spec.kind for group in layout.groups] == ["sliding_window"] * 3 + ["full"]
    assert len(manager(block_size=8, num_blocks=100).allocate(layout, layers).storages) == 4


def test_what_a_request_holds_behind_a_window_is_not_counted():
    windowed = layers_of(None, 8)
    # 7 blocks for 50 tokens. Of the windowed layer: a step of 32 tokens sees 7 more, over 6 blocks at most.
    assert manager(block_size=8, memory_bytes=10**9).plan(windowed, (), 0).num_blocks == 4 * (7 + 6) + 1
    with pytest.raises(CacheError, match="needs 14"):
        manager(block_size=8, num_blocks=13).plan(windowed, (), 0)


def test_latent_layers_keep_their_keys_alone():
    layers = [layer_of(index, 1, 12, latent_dim=8) for index in range(2)]
    cache = manager(block_size=8, num_blocks=20)
    layout = cache.plan(layers, (4,), 0)
    (group,) = layout.groups
    assert (group.spec.kind, group.spec.page_bytes, layout.block_bytes) == ("mla", 8 * 12 * 4, 2 * 8 * 12 * 4)
    caches = cache.allocate(layout, layers)
    assert len(caches.storages) == 2
    caches.keys[1][5] = torch.arange(12.0)
    assert caches.values[1][5].eq(torch.arange(8.0)).all()
    assert not caches.values[0].any()


def test_latent_layers_beside_others():
    """A draft with values: only its storages have a second half."""
    layers = [*(layer_of(index, 1, 12, latent_dim=8) for index in range(3)), layer_of(3, 2, 6, is_draft=True)]
    cache = manager(block_size=8, num_blocks=30)
    layout = cache.plan(layers, (), 0)
    assert [group.layers for group in layout.groups] == [(0, 1, 2), (3,)]
    assert layout.block_bytes == (3 + 1) * 8 * 12 * 4
    assert sum(storage.nbytes for storage in cache.allocate(layout, layers).storages) == 30 * layout.block_bytes


class TestQuantization:
    LAYERS = staticmethod(lambda: layers_of(None, 16, None, 16))

    @pytest.mark.parametrize(
        ("choice", "right"),
        [
            ({}, []),
            ({"default": "int8"}, [0, 1, 2, 3]),
            ({"full": "int8"}, [0, 2]),
            ({"default": "int8", "sliding": "none"}, [0, 2]),
            ({"layers": {"1-2": "int8"}}, [1, 2]),
            ({"sliding": "int8", "layers": {"1": "none", "2": "int8"}}, [2, 3]),
        ],
    )
    def test_which_layers(self, choice, right):
        cache = manager(block_size=8, num_blocks=100, quantization=CacheQuantization(**choice))
        layout = cache.plan(self.LAYERS(), (4,), 0)
        chosen = [index for group in layout.groups if group.spec.is_quantized for index in group.layers]
        assert sorted(chosen) == right
        assert layout.needs_zeroing == (0 < len(right) < 4)
        caches = cache.allocate(layout, self.LAYERS())
        assert sorted(caches.scales) == right
        assert [view.dtype for view in caches.keys] == [
            torch.int8 if index in right else torch.float32 for index in range(4)
        ]

    def test_a_draft_is_left_alone(self):
        layers = [layer_of(0, 2, 4), layer_of(1, 2, 4, is_draft=True)]
        cache = manager(num_blocks=20, quantization=CacheQuantization(default="int8"))
        assert [group.spec.dtype for group in cache.plan(layers, (), 0).groups] == ["int8", "float32"]

    def test_blocks_hold_four_times_the_tokens_and_scales_lie_apart(self):
        cache = manager(block_size=8, num_blocks=30, quantization=CacheQuantization(layers={"1-4": "int8"}))
        layers = layers_of(None, None, None, 16, 16)
        layout = cache.plan(layers, (4,), 0)
        assert [group.layers for group in layout.groups] == [(0,), (1, 2), (3, 4)]
        assert (layout.block_sizes, layout.strides) == ((8, 32, 32), (2, 8, 8))
        page, scales = 8 * 2 * 4 * 4, 32 * 2 * 4
        assert layout.block_bytes == 2 * 2 * (page + scales)
        caches = cache.allocate(layout, layers)
        assert sum(storage.nbytes for storage in caches.storages) == 30 * layout.block_bytes
        assert caches.scales[1][0].shape == (240, 4, 2)
        assert caches.scales[1][0].data_ptr() == caches.scales[3][0].data_ptr() != caches.scales[2][0].data_ptr()
        for of_layer in (caches.keys[1], caches.values[2], *caches.scales[3]):
            of_layer[8:16] = 1
        cache.copy_blocks(caches, [(1, 4)])
        assert all(view[32:40].eq(1).all() for view in (caches.keys[1], caches.values[2], *caches.scales[3]))
        cache.zero_blocks(caches, [1, 4])
        assert not any(storage.any() for storage in caches.storages)

    def test_what_is_refused(self):
        with pytest.raises(CacheError, match=r"layers names 4, 9: .* 0 to 3"):
            manager(num_blocks=20, quantization=CacheQuantization(layers={"3-4": "int8", "9": "none"})).plan(
                self.LAYERS(), (), 0
            )
        with pytest.raises(UnsupportedError, match=r"layers.0: cache.quantization is 'int8', and latent"):
            manager(num_blocks=20, quantization=CacheQuantization(default="int8")).plan(
                [layer_of(0, 1, 12, latent_dim=8)], (), 0
            )


class TestStates:
    def test_they_fill_whole_blocks_of_all_storages(self):
        cache = manager(block_size=8, num_blocks=30, quantization=CacheQuantization(layers={"1": "int8"}))
        layers = layers_of(None, None)
        layout = cache.plan(layers, (4,), 0, state_bytes=1000)
        # An int8 block has 32 tokens, so copies are made at multiples of 32.
        assert (layout.block_bytes, layout.state_blocks, layout.state_interval) == (2 * 256 + 2 * 256, 1, 32)
        layout = cache.plan(layers, (4,), 0, state_bytes=3000)
        assert (layout.state_blocks, layout.state_interval, layout.needs_zeroing) == (3, 32, True)
        caches = cache.allocate(layout, layers)
        state = torch.randint(0, 256, (3000,), dtype=torch.uint8)
        cache.write_state(caches, [5, 2, 9], state)
        assert torch.equal(cache.read_state(caches, [5, 2, 9], 3000), state)
        cache.zero_blocks(caches, [2, 5, 9])
        assert not any(storage.any() for storage in caches.storages)

    @pytest.mark.parametrize(("section", "right"), [({}, 32), ({"state_interval": 64}, 64)])
    def test_how_often_they_are_made(self, section, right):
        cache = manager(block_size=8, num_blocks=30, quantization=CacheQuantization(layers={"1": "int8"}), **section)
        assert cache.plan(layers_of(None, None), (), 0, state_bytes=1000).state_interval == right

    def test_an_interval_that_cuts_blocks_is_refused(self):
        cache = manager(
            block_size=8, num_blocks=30, state_interval=48, quantization=CacheQuantization(layers={"1": "int8"})
        )
        with pytest.raises(CacheError, match=r"cache.state_interval 48 is no multiple .* 32"):
            cache.plan(layers_of(None, None), (), 0, state_bytes=1000)


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
