"""Groups with sliding windows: what is behind the window is given back, and a hit needs the last window alone."""

import pytest
from scheduler_driver import Driver

from workerkit.components.engine.prefix_cache import BlockDigests
from workerkit.framework.errors import IntegrityError, RequestError
from workerkit.framework.interfaces.engine import CacheIdentity
from workerkit.framework.interfaces.kv_cache import KVCacheSpec


@pytest.fixture
def driver(fakes):
    return lambda **kwargs: Driver(fakes, **kwargs)


def windowed(fakes, num_blocks, block_sizes=(4,), windows=(6,), **options):
    return fakes.layout(1 + num_blocks, block_sizes, windows=windows, **options)


def least(fakes, shape, block_sizes, windows):
    """Blocks that one request needs at a time."""
    ahead = shape.num_speculative_tokens + 1 if shape.num_speculative_tokens else 0
    specs = [group.spec for group in windowed(fakes, 1, block_sizes, windows).groups]
    return sum(spec.count_blocks(shape.max_model_len, shape.max_num_batched_tokens + ahead) for spec in specs)


def cached(d, prompt, name="probe", **options):
    """How many of its tokens a request finds in the cache; it runs to its end."""
    d.add(name, prompt, **{"max_tokens": 1, **options})
    d.run()
    return d.cached[name]


def lose(d, group, block_size, prompt, index):
    """The content of one block is gone, as if it had been evicted."""
    pool = d.scheduler._blocks._pool
    block = pool.find((group, BlockDigests(block_size, CacheIdentity()).get(index, prompt)))
    del pool._blocks[pool._keys.pop(block)]
    del pool._evictable[block]
    pool._empty.append(block)
    d.check()


@pytest.mark.parametrize(("block_size", "window"), [(1, 1), (1, 5), (4, 1), (4, 2), (4, 5), (4, 6), (4, 8), (16, 7)])
@pytest.mark.parametrize("step", [1, 3, 16])
def test_how_many_blocks_a_request_holds_at_most(block_size, window, step):
    """Against counting those that the positions of a step and of the window before it lie in."""
    spec = KVCacheSpec(
        num_kv_heads=1, head_dim=8, dtype="float32", block_size=block_size, element_bytes=4, sliding_window=window
    )
    positions = [range(max(0, first - window + 1), first + step) for first in range(100)]
    most = max(len({position // block_size for position in seen}) for seen in positions)
    assert spec.count_blocks(10_000, step) == most
    assert spec.count_blocks(5, step) == min(most, -(-5 // block_size))


# Given back


def test_blocks_behind_the_window_are_given_back(driver, fakes):
    """Block 4, window 6: behind 8 and 16 computed tokens the next query sees positions from 3 and 11 on."""
    d = driver(layout=windowed(fakes, 20), shape=fakes.shape(max_num_batched_tokens=8))
    d.add("a", range(30), max_tokens=9)
    (request,) = d.scheduler._requests.values()
    held = []
    while d.live:
        d.step()
        held.append([index for index, block in enumerate(request.block_ids[0]) if block])
    assert held[:4] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [7, 8] in held  # of a decode
    assert d.scheduler.stats()["num_free_blocks"] == 20
    d.run()


def test_full_groups_keep_theirs(driver, fakes):
    d = driver(layout=windowed(fakes, 40, (4, 2), (None, 3)), shape=fakes.shape(max_num_batched_tokens=8))
    d.add("a", range(30), max_tokens=2)
    (request,) = d.scheduler._requests.values()
    for _ in range(3):
        d.step()
    assert all(request.block_ids[0])
    assert len(request.block_ids[0]) == 8  # for all known tokens from the beginning
    assert [bool(block) for block in request.block_ids[1]] == [False] * 11 + [True]
    d.run()


SHAPES = [{}, {"max_num_batched_tokens": 3}, {"num_speculative_tokens": 3}, {"num_speculative_tokens": 1}]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    ("block_sizes", "windows"),
    [((4,), (6,)), ((4,), (2,)), ((1,), (1,)), ((16,), (5,)), ((4, 2), (8, 3)), ((2, 8), (5, None))],
)
def test_the_least_blocks_serve_the_longest_request(driver, fakes, block_sizes, windows, async_scheduling, shape):
    """Several of them, too, although one preempts the other."""
    shape = fakes.shape(**shape)
    num_blocks = least(fakes, shape, block_sizes, windows)
    full = sum(-(-shape.max_model_len // size) for size in block_sizes)
    assert num_blocks < full
    layout = windowed(fakes, num_blocks, block_sizes, windows)
    d = driver(layout=layout, shape=shape, async_scheduling=async_scheduling)
    for name in range(3):
        d.add(f"{name}", [*range(40), name])
    d.run()
    assert len(d.done) == 3


def test_with_one_block_less_it_is_refused(driver, fakes):
    shape = fakes.shape(num_speculative_tokens=2)
    num_blocks = least(fakes, shape, (4, 2), (6, 3)) - 1
    d = driver(layout=windowed(fakes, num_blocks, (4, 2), (6, 3)), shape=shape)
    with pytest.raises(RequestError, match=f"need {num_blocks + 1} blocks, the whole cache has {num_blocks}"):
        d.add("a", range(50))
    d.add("a", range(10), max_tokens=3)
    d.run()


def test_prompts_are_admitted_for_their_windows(driver, fakes):
    """Two prompts of 15 blocks each run side by side in 12: each needs 5 at a time."""
    d = driver(layout=windowed(fakes, 12), shape=fakes.shape(max_num_batched_tokens=8))
    for name in range(2):
        d.add(f"{name}", [name] * 59, max_tokens=5)
    while len(d.scheduler._running) < 2:
        d.step()
    d.run()
    assert not d.count["preempted"]


def test_a_draft_that_may_be_rejected_gives_nothing_back(driver, fakes):
    """Block 1, window 2. With asynchronous scheduling the next step counts on drafts of which none is right."""
    d = driver(
        layout=windowed(fakes, 40, (1,), (2,)), shape=fakes.shape(num_speculative_tokens=4), async_scheduling=True
    )
    d.worker.propose = lambda request: (49,) * 4
    d.add("a", range(9), max_tokens=9)
    (request,) = d.scheduler._requests.values()
    d.start()
    while d.live:
        if len(d.in_flight) < 2:
            d.start()
        assert all(request.block_ids[0][request.num_confirmed - 1 :])
        d.collect()
    d.run()
    assert d.worker.num_drafts


def test_giving_back_too_early_is_found(driver, fakes):
    d = driver(layout=windowed(fakes, 20))
    d.add("a", range(30), max_tokens=9)
    d.step()
    (request,) = d.scheduler._requests.values()
    column = next(column for column, block in enumerate(request.block_ids[0]) if block)
    d.scheduler._blocks._pool.free([request.block_ids[0][column]])
    request.block_ids[0][column] = 0
    with pytest.raises(IntegrityError, match="'a' gave back blocks of group 0 that it may still read"):
        d.scheduler.check_integrity()


# Hits


def test_a_hit_holds_the_blocks_of_the_last_window_alone(driver, fakes):
    d = driver(layout=windowed(fakes, 40, (4, 4), (None, 6)))
    assert cached(d, range(30)) == 0
    d.add("a", [*range(28), 40, 41], max_tokens=2)
    (new,) = d.step().new_requests
    assert new.num_computed_tokens == 28
    assert all(new.block_ids[0])
    assert [bool(block) for block in new.block_ids[1]] == [False] * 5 + [True] * 3  # 23 and on
    d.run()


def test_blocks_behind_the_last_window_may_be_lost(driver, fakes):
    d = driver(layout=windowed(fakes, 40, (4, 4), (None, 6)))
    prompt = list(range(30))
    cached(d, prompt)
    for index in range(5):
        lose(d, 1, 4, prompt, index)
    assert cached(d, [*prompt[:28], 40]) == 28


@pytest.mark.parametrize(("lost", "found"), [(6, 24), (5, 20), (4, 28), (0, 28)])
def test_a_lost_block_shortens_a_hit_to_a_window_that_is_whole(driver, fakes, lost, found):
    """Of 28 tokens the last window begins in block 5, of 24 in block 4."""
    d = driver(layout=windowed(fakes, 40, (4, 4), (None, 6)))
    prompt = list(range(30))
    cached(d, prompt)
    lose(d, 1, 4, prompt, lost)
    assert cached(d, [*prompt[:28], 40]) == found


def test_a_full_group_needs_them_all(driver, fakes):
    d = driver(layout=windowed(fakes, 40, (4, 4), (None, 6)))
    prompt = list(range(30))
    cached(d, prompt)
    lose(d, 0, 4, prompt, 1)
    assert cached(d, [*prompt[:28], 40]) == 4


@pytest.mark.parametrize(("window", "lost", "found"), [(6, 1, 15), (6, 2, 8), (5, 2, 8), (4, 2, 15), (1, 2, 15)])
def test_a_full_hit_with_a_window(driver, fakes, window, lost, found):
    """The last of 16 tokens is computed again; with a window of 6 it sees positions 10 to 15, of 4, 12 and on."""
    d = driver(layout=windowed(fakes, 40, (4,), (window,)))
    prompt = list(range(16))
    cached(d, prompt, max_tokens=2)
    lose(d, 0, 4, prompt, lost)
    assert cached(d, prompt, max_tokens=5) == found


def test_a_full_hit_needs_the_last_block_of_every_group(driver, fakes):
    """Of blocks of one token a query sees the last one only when it computes the token behind it."""
    d = driver(layout=windowed(fakes, 40, (4, 1), (None, 3)))
    prompt = list(range(8))
    cached(d, prompt)
    lose(d, 1, 1, prompt, 7)
    assert cached(d, prompt) == 4


def test_b157_blocks_of_one_group_are_lost_those_of_others_untouched(driver, fakes):
    """Sizes 16 and 8: without the first block of group 1 nothing is left, at the common boundary below it; group 0's
    block, which another request holds, stays what it is."""
    d = driver(layout=fakes.layout(40, (16, 8)))
    prompt = list(range(16))
    cached(d, prompt)
    lose(d, 1, 8, prompt, 0)
    pool = d.scheduler._blocks._pool
    key = (0, BlockDigests(16, CacheIdentity()).get(0, prompt))
    block = pool.find(key)
    d.add("a", [*prompt, 40], max_tokens=2)
    (new,) = d.step().new_requests
    assert new.num_computed_tokens == 0
    assert new.block_ids[0][0] != block
    assert pool.find(key) == block
    d.run()
    assert cached(d, [*prompt, 41]) == 16


def test_what_is_behind_the_window_goes_first(driver, fakes):
    """While `a` runs, blocks that it gave back make room before those of its last window do, when it is done."""
    d = driver(layout=windowed(fakes, 12), shape=fakes.shape(max_num_batched_tokens=8))
    prompt = list(range(33))
    cached(d, prompt, "a")
    cached(d, [49] * 7, "b")
    assert cached(d, [*prompt[:32], 40]) == 32


def test_blocks_are_published_before_they_are_given_back(driver, fakes):
    """A verified run of drafts passes whole blocks, and the window, in one step."""
    d = driver(layout=windowed(fakes, 63, (1,), (1,)), shape=fakes.shape(num_speculative_tokens=4))
    d.add("a", range(5), max_tokens=40)
    d.run()
    assert d.worker.num_drafts_accepted > 5
    known = [*range(5), *d.done["a"][0]][:-1]
    pool = d.scheduler._blocks._pool
    digests = BlockDigests(1, CacheIdentity())
    assert all(pool.find((0, digests.get(index, known))) for index in range(len(known)))


# Zeroing


def test_blocks_are_zeroed_where_types_differ(driver, fakes):
    d = driver(layout=fakes.layout(64, (4, 4), dtypes=["float32", "bfloat16"]))
    d.add("a", range(9), max_tokens=6)
    (new,) = (output := d.step()).new_requests
    assert sorted(output.blocks_to_zero) == sorted(block for have in new.block_ids for block in have)
    assert len(output.blocks_to_zero) == 6
    zeroed = [len(d.step().blocks_to_zero) for _ in range(4)]
    assert zeroed == [0, 0, 0, 2]
    d.run()


def test_a_block_that_is_copied_whole_is_not_zeroed(driver, fakes):
    d = driver(layout=fakes.layout(64, (4, 4), dtypes=["float32", "bfloat16"]))
    cached(d, range(8))
    d.add("b", range(8), max_tokens=3)
    output = d.step()
    assert len(output.block_copies) == 2
    assert output.blocks_to_zero == ()
    assert len(d.step().blocks_to_zero) == 2
    d.run()


def test_blocks_of_who_is_gone_are_zeroed_with_their_step(driver, fakes):
    d = driver(layout=fakes.layout(64, (4, 4), dtypes=["float32", "bfloat16"]))
    d.add("a", range(9), max_tokens=6)
    assert len(d.start().blocks_to_zero) == 6
    d.abort("a")
    d.collect()
    assert d.start().blocks_to_zero == ()
    d.run()


def test_equal_types_are_not_zeroed(driver, fakes):
    d = driver(layout=fakes.layout(64, (4, 8), windows=[None, 6]))
    d.add("a", range(9), max_tokens=6)
    d.run()
    assert not d.worker.num_zeroed
