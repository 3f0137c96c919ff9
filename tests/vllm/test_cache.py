"""The KV cache under vLLM: its specs and groups of our layers, our layout of its blocks, and the blocks of a step."""

from types import SimpleNamespace

import attrs
import pytest
import torch
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm_steps import enter, requests, scheduled

from workerkit.components.kv_cache.paged import PagedKVCache
from workerkit.framework.errors import UnsupportedError
from workerkit.framework.interfaces.device import DeviceContext
from workerkit.framework.interfaces.kv_cache import AttentionLayer, KVCacheGroup, KVCacheSpec, KVLayout
from workerkit.framework.interfaces.runner import WorkerShape
from workerkit.framework.interfaces.sections import CacheQuantization, CacheSection
from workerkit.plugins.vllm.cache import Blocks, layout_of, specs_of_layers

FULL = KVCacheSpec(num_kv_heads=2, head_dim=32, dtype="bfloat16", block_size=16, element_bytes=2)
WINDOW = KVCacheSpec(num_kv_heads=1, head_dim=64, dtype="bfloat16", block_size=16, element_bytes=2, sliding_window=128)
PLANNED = KVLayout(
    num_blocks=9,
    groups=(KVCacheGroup(spec=FULL, layers=(0, 2)), KVCacheGroup(spec=WINDOW, layers=(1, 3))),
    kernel_block_size=8,
)


def layers_of(*fields):
    """Layers with two heads of 32 elements, unless their fields say other."""
    plain = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "scale": 1.0}
    return tuple(
        AttentionLayer(name=f"layers.{index}", index=index, **(plain | more)) for index, more in enumerate(fields)
    )


def manager(**quantization):
    section = CacheSection(block_size=16, num_blocks=1000, quantization=CacheQuantization(**quantization))
    shape = WorkerShape(max_model_len=256, max_num_reqs=4, max_num_batched_tokens=64, vocab_size=10)
    return PagedKVCache(section, shape, DeviceContext(device=torch.device("cpu"), dtype=torch.bfloat16))


def grouped(layers, /, *, one_allocator=False, **quantization):
    """What vLLM makes of the layers' specs: (specs by layer, groups, our layout, its tables)."""
    cache = manager(**quantization)
    planned = cache.plan(layers, (), 0)
    specs = specs_of_layers(planned, layers)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=one_allocator),
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: SimpleNamespace(is_block_outermost=False)),
        speculative_config=None,
    )
    groups = get_kv_cache_groups(config, dict(specs))
    layout, tables = layout_of(SimpleNamespace(num_blocks=50, kv_cache_groups=groups), planned, layers)
    return specs, groups, layout, tables


def assert_served(layers, layout, tables):
    """Every block of a request is its own, in each layer, whatever other groups hold at the same time."""
    caches = manager().allocate(layout, layers)
    held = {table: block for block, table in enumerate(dict.fromkeys(tables), 1)}  # one block of each of vLLM's groups
    for layer in layers:
        group = caches.group_of_layer[layer.index]
        stride, size = layout.strides[group], layout.block_sizes[group] // layout.kernel_block_size
        first = held[tables[group]] * stride
        for cache in (caches.keys[layer.index], caches.values[layer.index]):
            if layer.latent_dim is None or cache is caches.keys[layer.index]:
                cache[first : first + size] = 1 + layer.index
    for layer in layers:
        group = caches.group_of_layer[layer.index]
        stride, size = layout.strides[group], layout.block_sizes[group] // layout.kernel_block_size
        first = held[tables[group]] * stride
        for cache in (caches.keys[layer.index], caches.values[layer.index]):
            assert cache[first : first + size].eq(1 + layer.index).all()


def test_layers_of_each_kind():
    layers = layers_of({}, {}, {}, {})
    specs = specs_of_layers(PLANNED, layers)
    assert [*specs] == [layer.name for layer in layers]
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    window = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, sliding_window=128)
    assert [*specs.values()] == [full, window, full, window]
    assert {spec.page_size_bytes for spec in specs.values()} == {FULL.page_bytes} == {WINDOW.page_bytes}


def test_vllm_groups_them_as_it_likes():
    layers = layers_of({}, {}, {}, {})
    specs = specs_of_layers(PLANNED, layers)
    groups = [
        KVCacheGroupSpec([f"layers.{i}" for i in members], specs[f"layers.{members[0]}"])
        for members in ([3], [2], [1], [0])
    ]
    layout, tables = layout_of(SimpleNamespace(num_blocks=77, kv_cache_groups=groups), PLANNED, layers)
    assert (layout.num_blocks, layout.kernel_block_size, tables) == (77, 8, (0, 1, 2, 3))
    assert [(group.spec, group.layers) for group in layout.groups] == [
        (WINDOW, (3,)),
        (FULL, (2,)),
        (WINDOW, (1,)),
        (FULL, (0,)),
    ]


def test_latent_layers():
    layers = layers_of(*[{"num_kv_heads": 1, "head_dim": 48, "latent_dim": 32}] * 2)
    specs, groups, layout, tables = grouped(layers)
    assert specs["layers.0"] == MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=48, dtype=torch.bfloat16)
    assert specs["layers.0"].page_size_bytes == layout.groups[0].spec.page_bytes == 16 * 48 * 2
    assert (len(groups), tables) == (1, (0,))
    assert_served(layers, layout, tables)


def test_windowed_layers_of_another_count():
    layers = layers_of(*([{"sliding_window": 32}] * 3 + [{}]) * 2)
    _, groups, layout, tables = grouped(layers)
    assert sorted(len(group.layer_names) for group in groups) == [2, 2, 2, 2]
    assert layout.block_sizes == (16,) * 4
    assert_served(layers, layout, tables)


@pytest.mark.parametrize("one_allocator", [False, True])
def test_quantised_layers_have_larger_blocks(one_allocator):
    layers = layers_of({}, {"sliding_window": 32}, {}, {"sliding_window": 32})
    specs, _, layout, tables = grouped(layers, one_allocator=one_allocator, sliding="int8")
    assert [specs[f"layers.{index}"].block_size for index in range(4)] == [16, 32, 16, 32]
    assert len({spec.page_size_bytes for spec in specs.values()}) == 1
    assert specs["layers.1"].page_size_bytes == 2 * 32 * (2 * 32 + 2 * 4)
    assert not layout.groups[0].spec.is_quantized
    if one_allocator:  # windowed layers in blocks as small as those of the others
        assert set(layout.block_sizes) == {16}
    else:
        assert layout.block_sizes == (16, 32)
    assert_served(layers, layout, tables)


def test_quantised_layers_beside_others_without_windows():
    layers = layers_of({}, {}, {}, {})
    _, _, layout, tables = grouped(layers, layers={"1-2": "int8"})
    assert sorted(layout.block_sizes) == [16, 32]
    assert tables == (0, 1)
    assert_served(layers, layout, tables)


def test_layers_of_other_shapes_that_vllm_puts_into_one_group():
    """A draft, say: one table for all, so no storage is shared."""
    layers = layers_of({}, {}, {"head_dim": 48, "is_draft": True})
    specs, groups, layout, tables = grouped(layers)
    assert len(groups) == 1
    assert specs["layers.2"].page_size_bytes == 2 * 16 * 2 * 48 * 2
    assert [(group.layers, group.first_storage) for group in layout.groups] == [((0, 1), 0), ((2,), 2)]
    assert tables == (0, 0)
    assert_served(layers, layout, tables)
    storages = manager().allocate(layout, layers).storages
    assert sum(storage.nbytes for storage in storages) == 50 * sum(spec.page_size_bytes for spec in specs.values())


def test_blocks_that_do_not_fit_are_refused():
    layers = layers_of({}, {}, {}, {})
    specs = specs_of_layers(PLANNED, layers)
    for size in (12, 64):
        wrong = FullAttentionSpec(block_size=size, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
        config = SimpleNamespace(num_blocks=9, kv_cache_groups=[KVCacheGroupSpec(["layers.0"], wrong)])
        with pytest.raises(UnsupportedError, match=f"gives layer layers.0 blocks of {size} tokens: .* 8 up to 16"):
            layout_of(config, PLANNED, layers)
    assert len(specs) == 4


def test_a_latent_layer_with_a_window_is_refused_by_name():
    layers = layers_of({"num_kv_heads": 1, "head_dim": 48, "latent_dim": 32, "sliding_window": 8})
    with pytest.raises(UnsupportedError, match=r"layers.0: vLLM has no spec for latent .* window"):
        specs_of_layers(manager().plan(layers, (), 0), layers)


class TestBlocks:
    @pytest.mark.parametrize("protocol", ["v1", "v2"])
    def test_a_table_that_several_of_our_groups_have(self, protocol):
        told = requests()
        told.blocks = Blocks(PLANNED, (0, 0))
        first = told.read(scheduled(protocol, new=[enter("a", [1, 2, 3], blocks=([1, 2],))])).output
        assert first.new_requests[0].block_ids == ((1, 2), (1, 2))
        second = told.read(scheduled(protocol, running=[("a", 3, ([7],))])).output
        assert second.cached_requests[0].new_block_ids == ((7,), (7,))
        assert first.blocks_to_zero == second.blocks_to_zero == ()

    @pytest.mark.parametrize("protocol", ["v1", "v2"])
    def test_blocks_that_change_their_type_are_zeroed(self, protocol):
        full, window = PLANNED.groups
        int8 = attrs.evolve(window, spec=attrs.evolve(window.spec, dtype="int8", element_bytes=1, block_size=32))
        told = requests()
        told.blocks = Blocks(attrs.evolve(PLANNED, groups=(full, int8)), (0, 1))
        # 32 tokens are found in the cache; the window has left the first block of the second group.
        entering = enter("a", [1] * 40, blocks=([4, 5, 6], [0, 8]), computed=32)
        assert told.read(scheduled(protocol, new=[entering])).output.blocks_to_zero == (6, 8)
        step = scheduled(protocol, running=[("a", 40, ([9], [3]))], new_block_ids_to_zero=[9])
        assert set(told.read(step).output.blocks_to_zero) == {9, 3}
