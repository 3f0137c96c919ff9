"""Models with recurrent layers: where copies of their state are made, kept and found."""

import pytest
from scheduler_driver import Driver

from workerkit.framework.interfaces.engine import CacheIdentity


@pytest.fixture
def driver(fakes):
    """A scheduler for blocks of 4 tokens and copies at every 8, in 2 blocks each."""

    def make(num_blocks=63, block_sizes=(4,), state_blocks=2, state_interval=8, windows=None, layout=None, **options):
        layout = layout or fakes.layout(
            1 + num_blocks, block_sizes, windows=windows, state_blocks=state_blocks, state_interval=state_interval
        )
        return Driver(fakes, layout=layout, **options)

    return make


def cached(d, prompt, name="probe", **options):
    """How many of its tokens a request finds in the cache; it runs to its end."""
    d.add(name, prompt, **{"max_tokens": 1, **options})
    d.run()
    return d.cached[name]


def saved(output):
    return [(save.req_id, save.num_tokens) for save in output.state_saves]


def steps(d):
    """[(tokens, lengths that are saved)] of the only request's steps."""
    done = []
    while d.live:
        output = d.step()
        done.append((sum(output.num_scheduled_tokens.values()), [length for _, length in saved(output)]))
    return done


def count_copies(d):
    """Blocks that hold a copy, for others to find."""
    return sum(group < 0 for group, _ in d.scheduler._blocks._pool._blocks)


# Prefills


def test_b168_a_copy_is_of_all_tokens_that_it_is_known_by(driver, fakes):
    """Chunks of 6 and copies at every 8: the second chunk ends there, and others go on from the state behind 8 tokens.
    The worker checks the state that a request starts from; without a copy nothing is found."""
    d = driver(shape=fakes.shape(max_num_batched_tokens=6))
    d.add("a", range(20), max_tokens=1)
    assert steps(d) == [(6, []), (2, [8]), (6, []), (2, [16]), (4, [])]
    assert cached(d, [*range(8), 40]) == 8
    assert cached(d, [*range(14), 40]) == 8
    assert cached(d, [*range(18), 40]) == 16
    assert cached(d, range(7)) == 0


@pytest.mark.parametrize(
    ("length", "budget", "expected"),
    [
        (7, 16, [(7, [])]),
        (8, 16, [(8, [8])]),
        (9, 16, [(8, [8]), (1, [])]),
        (30, 64, [(24, [24]), (6, [])]),
        (30, 20, [(16, [16]), (8, [24]), (6, [])]),
        (30, 8, [(8, [8]), (8, [16]), (8, [24]), (6, [])]),
        (10, 3, [(3, []), (3, []), (2, [8]), (2, [])]),
    ],
)
def test_a_prefill_is_cut_where_a_copy_can_be_made(driver, fakes, length, budget, expected):
    d = driver(shape=fakes.shape(max_num_batched_tokens=budget))
    d.add("a", range(length), max_tokens=1)
    assert steps(d) == expected
    assert d.worker.num_saves == count_copies(d) // 2 == sum(len(lengths) for _, lengths in expected)


def test_what_a_cut_leaves_of_a_step_goes_to_others(driver, fakes):
    d = driver(shape=fakes.shape(max_num_batched_tokens=16))
    d.add("a", range(12), max_tokens=2)
    d.add("b", range(20, 30), max_tokens=2)
    output = d.step()
    assert output.num_scheduled_tokens == {"a": 8, "b": 8}
    assert saved(output) == [("a", 8), ("b", 8)]
    d.run()


def test_prompts_that_must_not_be_cut_are_saved_where_they_end(driver, fakes):
    d = driver(shape=fakes.shape(max_num_batched_tokens=64), chunked_prefill=False)
    d.add("a", range(30), max_tokens=1)
    assert steps(d) == [(30, [])]
    d.add("b", range(32), max_tokens=1)
    assert steps(d) == [(32, [32])]
    d.run()


def test_without_prefix_caching_nothing_is_cut_or_saved(driver, fakes):
    d = driver(shape=fakes.shape(max_num_batched_tokens=64), prefix_caching=False)
    d.add("a", range(30), max_tokens=20)
    assert steps(d) == [(30, []), *[(1, [])] * 19]
    assert cached(d, range(30)) == 0
    assert d.worker.num_zeroed


def test_what_is_there_already_is_not_saved_again(driver, fakes):
    """The first request's prompt ends before the second one's; a request that must not read the cache passes both."""
    d = driver(shape=fakes.shape(max_num_batched_tokens=64))
    cached(d, range(10))
    d.add("b", range(20), max_tokens=1)
    assert steps(d) == [(8, [16]), (4, [])]
    d.add("c", range(20), max_tokens=1, prompt_logprobs=0)
    assert steps(d) == [(20, [])]
    d.run()


# Hits


def test_a_hit_brings_the_state_with_it(driver):
    d = driver()
    cached(d, range(20))
    d.add("a", [*range(18), 40], max_tokens=2)
    (new,) = d.step().new_requests
    assert new.num_computed_tokens == 16
    assert len(new.state_block_ids) == 2
    assert not set(new.state_block_ids) & set(new.block_ids[0])
    d.run()


def test_a_whole_prompt_is_no_hit(driver, fakes):
    """Nobody has the state behind all tokens but one."""
    d = driver(shape=fakes.shape(max_num_batched_tokens=8))
    assert cached(d, range(16)) == 0
    assert count_copies(d) == 4
    assert cached(d, range(16)) == 8
    assert not d.count["copies"]


def test_keys_and_values_without_a_state_are_no_hit(driver):
    d = driver()
    cached(d, range(20))
    pool = d.scheduler._blocks._pool
    for key in [key for key in pool._blocks if key[0] == -2]:  # half of each copy
        block = pool._blocks.pop(key)
        del pool._keys[block], pool._evictable[block]
        pool._empty.append(block)
    assert cached(d, [*range(18), 40]) == 0
    assert cached(d, [*range(18), 41]) == 16  # its copies took the other half's place


def test_a_state_without_keys_and_values_is_no_hit(driver):
    d = driver()
    cached(d, range(20))
    pool = d.scheduler._blocks._pool
    (first, *_) = (key for key in pool._blocks if key[0] == 0)
    block = pool._blocks.pop(first)
    del pool._keys[block], pool._evictable[block]
    pool._empty.append(block)
    assert cached(d, [*range(18), 40]) == 0


def test_other_content_has_other_states(driver):
    d = driver()
    cached(d, range(20), identity=CacheIdentity(lora="l"))
    assert cached(d, range(20)) == 0
    assert cached(d, range(20), identity=CacheIdentity(lora="l")) == 16


def test_windows_and_blocks_of_several_sizes(driver):
    d = driver(block_sizes=(4, 2, 8), windows=(None, 3, 6))
    assert cached(d, range(30)) == 0
    d.add("a", [*range(28), 40], max_tokens=2)
    (new,) = d.step().new_requests
    assert new.num_computed_tokens == 24
    assert [block > 0 for block in new.block_ids[1]][:12] == [False] * 11 + [True]
    d.run()


# Decodes


def test_decodes_are_saved_too(driver):
    """A conversation goes on from its last answer."""
    d = driver()
    d.add("a", range(6), max_tokens=12)
    assert [lengths for _, lengths in steps(d)] == [[], [], [8], *[[]] * 7, [16], []]
    assert cached(d, [*range(6), *d.done["a"][0], 1, 2]) == 16


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_between_drafts_a_copy_is_kept_if_they_reach_it(driver, fakes, async_scheduling):
    """Each multiple of 8 that a request passes is saved, by one step or the next."""
    d = driver(400, shape=fakes.shape(num_speculative_tokens=3), async_scheduling=async_scheduling)
    for name in range(12):
        d.add(f"{name}", [name] * 5, max_tokens=50)
    d.run()
    asked = sum(len(output.state_saves) for output in d.worker.outputs)
    assert d.worker.num_saves < asked
    for name in range(12):
        history = [*[name] * 5, *d.done[f"{name}"][0]]
        assert [cached(d, history[: length + 1]) for length in (8, 16, 24, 32, 40, 48)] == [8, 16, 24, 32, 40, 48]


def test_a_copy_of_the_last_step_is_kept(driver):
    """The token that ends the request is sampled by the step that computes the 16th."""
    d = driver()
    d.add("a", range(6), max_tokens=11)
    d.run()
    assert cached(d, [*range(6), *d.done["a"][0]]) == 16


# Blocks


def test_copies_are_held_by_nobody(driver):
    d = driver(num_blocks=20)
    cached(d, range(30))
    assert count_copies(d) == 4
    assert d.scheduler.stats()["num_free_blocks"] == 20
    for name in range(5):  # and make room for others
        cached(d, [40 + name] * 30)
    assert cached(d, [*range(28), 41]) == 0


def test_no_copy_where_there_is_no_room(driver, fakes):
    """Four blocks hold the request, and one is left: its prefill is not cut."""
    d = driver(num_blocks=5, shape=fakes.shape(max_model_len=20, max_num_batched_tokens=64))
    d.add("a", range(15), max_tokens=1)
    assert steps(d) == [(15, [])]
    d.run()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_nobody_is_preempted_for_a_copy(driver, fakes, async_scheduling):
    """Eight blocks are exactly what both need together."""
    d = driver(num_blocks=8, shape=fakes.shape(max_model_len=16), async_scheduling=async_scheduling)
    for name in "ab":
        d.add(name, [ord(name) % 50] * 6, max_tokens=10)
    d.run()
    assert d.worker.num_saves
    assert not d.count["preempted"]


def test_nobody_is_preempted_while_copies_in_flight_will_make_room(driver):
    """`long` is urgent and takes each step whole, so `short` is in none of them and could be preempted; `long` grows
    with every step, and holds copies of two steps."""
    for num_blocks in range(10, 22):
        counts = []
        for prefix_caching in (False, True):
            d = driver(
                num_blocks,
                state_blocks=5,
                windows=(5,),
                async_scheduling=True,
                policy="priority",
                prefix_caching=prefix_caching,
            )
            d.add("short", [1] * 8, max_tokens=6, priority=1)
            d.step()
            d.add("long", range(49), max_tokens=2)
            d.run()
            counts.append(d.count["preempted"])
        assert counts[1] <= counts[0], num_blocks


def test_a_hit_whose_state_cannot_be_held_is_none(driver, fakes):
    """All but two blocks are needed for what is new: a copy of two more would keep the request waiting forever."""
    d = driver(num_blocks=5, shape=fakes.shape(max_model_len=20, max_num_batched_tokens=64))
    d.add("a", range(8), max_tokens=1)
    d.run()
    assert count_copies(d) == 2
    d.add("b", range(19), max_tokens=1)
    assert d.step().new_requests[0].num_computed_tokens == 0
    d.run()


def test_the_copy_that_a_request_starts_from_is_not_written_in_its_step(driver, fakes):
    """`b` takes every free block, and a copy would be welcome; `a`'s copy is read first."""
    d = driver(num_blocks=9, shape=fakes.shape(max_num_batched_tokens=64, max_model_len=24))
    cached(d, range(9))
    d.add("a", [*range(8), 40], max_tokens=4)
    d.add("b", range(20, 36), max_tokens=4)
    output = d.step()
    state = set(output.new_requests[0].state_block_ids)
    assert state
    assert state.isdisjoint(block for new in output.new_requests for ids in new.block_ids for block in ids)
    assert state.isdisjoint(block for save in output.state_saves for block in save.block_ids)
    d.run()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_abort_in_flight_keeps_no_copy(driver, async_scheduling):
    d = driver(async_scheduling=async_scheduling)
    d.add("a", range(20), max_tokens=4)
    assert saved(d.start())
    d.abort("a")
    d.run()
    assert count_copies(d) == 0


def test_after_a_reset_nothing_of_before_is_kept(driver):
    d = driver()
    d.add("a", range(30), max_tokens=9)
    assert saved(d.start())
    d.scheduler.reset_prefix_cache()
    while d.live:
        d.collect()
        assert not saved(d.start())
    d.run()
    assert count_copies(d) == 0


def test_blocks_are_zeroed_but_not_those_of_copies(driver):
    """Attention never finds bytes of a state in a block, which need not be numbers."""
    d = driver(num_blocks=12)
    for name in range(6):
        cached(d, [name] * 30)
    assert d.worker.num_zeroed >= 6 * 8
