import pytest
from scheduler_driver import Driver

from workerkit.components.engine.prefix_cache import BlockDigests
from workerkit.framework.interfaces.engine import CacheIdentity, MultimodalSpan

PLAIN = CacheIdentity()


@pytest.fixture
def driver(fakes):
    return lambda **kwargs: Driver(fakes, **kwargs)


def cached(d, prompt, name="probe", **options):
    """How many of its tokens a request finds in the cache; it runs to its end."""
    d.add(name, prompt, **{"max_tokens": 1, **options})
    d.run()
    return d.cached[name]


# What a block is known by


def digests(token_ids, block_size=4, **identity):
    chain = BlockDigests(block_size, CacheIdentity(**identity))
    return [chain.get(index, token_ids) for index in range(len(token_ids) // block_size)]


def test_b29_a_digest_is_of_the_whole_prefix():
    """Block 1 has the same tokens after different parents."""
    first, second = digests([1, 2, 3, 4, 9, 9, 9, 9]), digests([1, 2, 3, 5, 9, 9, 9, 9])
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert digests([9, 9, 9, 9])[0] not in (first[1], second[1])


def test_b29_a_digest_is_collision_safe():
    """SHA-256 of an encoding that nothing else shares; never hash(), under which -1 and -2 or 0 and 2**61 - 1 agree."""
    (plain,) = digests([1, 2, 3, 4])
    assert len(plain) == 32
    assert digests([1, 2, 3, 4]) == [plain]
    assert digests([1, 23, 4, 0]) != digests([12, 3, 4, 0])
    assert digests([0] * 4) != digests([2**61 - 1, 0, 0, 0])
    assert digests([1, 2, 3, 4], salt="None") != [plain]
    assert digests([1, 2, 3, 4], salt="x") != digests([1, 2, 3, 4], lora="x")
    assert digests([1, 2, 3, 4], salt="a', 'b") != digests([1, 2, 3, 4], salt="a", lora="b")
    assert digests([7, 7], block_size=2)[0] != digests([7], block_size=1)[0]


def test_b29_two_prompts_of_one_block_share_nothing(driver, fakes):
    d = driver(layout=fakes.layout(64, (16,)))
    assert cached(d, range(17), "a") == 0
    assert cached(d, range(1, 18), "b") == 0
    assert cached(d, range(17), "c") == 16


def test_digests_are_computed_once():
    chain = BlockDigests(2, PLAIN)
    first = chain.get(2, [1, 2, 3, 4, 5, 6])
    assert chain.get(2, []) is first  # no token is read again


# Who shares


def test_a_prefix_is_found(driver):
    d = driver()
    assert cached(d, range(11)) == 0
    assert cached(d, [*range(9), 40, 41]) == 8
    assert cached(d, range(1, 12)) == 0
    assert d.scheduler.stats()["num_cached_tokens"] == 8


def test_generated_tokens_are_found(driver):
    """The conversation so far is the next prompt; the last token generated was never computed."""
    d = driver()
    d.add("a", range(6), max_tokens=7)
    d.run()
    history = [*range(6), *d.done["a"][0]]
    assert cached(d, [*history, 1]) == 12


def test_partial_blocks_are_not_shared(driver, fakes):
    d = driver(layout=fakes.layout(64, (8,)))
    assert cached(d, range(7)) == 0
    assert cached(d, range(12)) == 0
    assert cached(d, [*range(11), 40]) == 8


def test_off_means_off(driver):
    d = driver(prefix_caching=False)
    assert cached(d, range(20)) == 0
    assert cached(d, range(20)) == 0


def test_b28_adapters_do_not_share(driver):
    """The identity is that of the weights: the same name may be given twice."""
    d = driver()
    assert cached(d, range(9), identity=CacheIdentity(lora="name@1")) == 0
    assert cached(d, range(9), identity=CacheIdentity(lora="name@2")) == 0
    assert cached(d, range(9)) == 0
    assert cached(d, range(9), identity=CacheIdentity(lora="name@1")) == 8


def test_salts_do_not_share(driver):
    d = driver()
    assert cached(d, range(9), identity=CacheIdentity(salt="x")) == 0
    assert cached(d, range(9), identity=CacheIdentity(salt="y")) == 0
    assert cached(d, range(9)) == 0
    assert cached(d, range(9), identity=CacheIdentity(salt="x")) == 8


@pytest.mark.parametrize(("start", "shared"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (12, 12)])
def test_different_images_share_what_comes_before(driver, start, shared):
    """Positions 0 to 15 in blocks of 4; an image of 3 tokens, perhaps across a boundary. The tokens are alike."""

    def with_image(digest):
        return CacheIdentity(multimodal=(MultimodalSpan(start=start, length=3, digest=digest),))

    d = driver()
    assert cached(d, range(17), identity=with_image("p")) == 0
    assert cached(d, range(17), identity=with_image("q")) == shared
    assert cached(d, range(17)) == shared
    assert cached(d, range(17), identity=with_image("p")) == 16


def test_the_same_image_elsewhere_is_not_found(driver):
    d = driver()
    for start, length in ((0, 4), (1, 4), (0, 8)):
        image = MultimodalSpan(start=start, length=length, digest="p")
        assert cached(d, [1] * 9, identity=CacheIdentity(multimodal=(image,))) == 0


@pytest.mark.parametrize(("common", "found"), [(6, 0), (10, 8), (16, 16)])
def test_b103_groups_share_what_all_of_them_have(driver, fakes, common, found):
    """Block sizes 2 and 8: a hit is a multiple of 8."""
    d = driver(layout=fakes.layout(64, (2, 8)))
    assert cached(d, range(20)) == 0
    assert cached(d, [*range(common), *[40] * 5]) == found


def test_a_prefix_that_one_group_lost_is_not_found(driver, fakes):
    """The tail of either group is evicted before anything that comes earlier."""
    d = driver(layout=fakes.layout(1 + 14, (2, 8)), shape=fakes.shape(max_num_batched_tokens=64))
    cached(d, range(17))  # 9 and 3 blocks, of which 8 and 2 are full
    assert d.scheduler.stats()["num_free_blocks"] == 14
    cached(d, [40] * 4, "other")  # 2 + 1 blocks; 4 were empty
    cached(d, [41] * 8, "other")  # 4 + 1
    d.add("probe", range(17), max_tokens=1)
    assert d.step().new_requests[0].num_computed_tokens == 8
    d.run()


# Full hits


def test_a_full_hit_computes_the_last_token_in_a_copy(driver):
    d = driver()
    d.add("a", range(8), max_tokens=1)
    d.run()
    d.add("b", range(8), max_tokens=3)
    output = d.step()
    (new,) = output.new_requests
    assert new.num_computed_tokens == 7
    assert output.num_scheduled_tokens == {"b": 1}
    ((source, target),) = output.block_copies
    assert source == d.scheduler._blocks._pool.find((0, digests(range(8))[1]))
    assert target == new.block_ids[0][1] != source
    d.run()
    assert d.cached["b"] == 7


def test_a_full_hit_copies_a_block_of_each_group(driver, fakes):
    d = driver(layout=fakes.layout(64, (2, 8)))
    assert cached(d, range(16)) == 0
    assert cached(d, range(16)) == 15
    assert d.count["copies"] == 2


def test_blocks_of_one_token_need_no_copy(driver, fakes):
    d = driver(layout=fakes.layout(64, (1,)))
    assert cached(d, range(5)) == 0
    assert cached(d, range(5)) == 4
    assert d.count["copies"] == 0


@pytest.mark.parametrize(("length", "found"), [(8, 4), (9, 8), (4, 0)])
def test_a_request_of_the_same_step_shares_but_copies_nothing(driver, length, found):
    """The copy would be made before the step writes what is to be copied."""
    d = driver()
    for name in "ab":
        d.add(name, range(length), max_tokens=2)
    output = d.step()
    assert [new.num_computed_tokens for new in output.new_requests] == [0, found]
    assert not output.block_copies
    d.run()


def test_one_step_later_the_block_can_be_copied(driver):
    d = driver(async_scheduling=True)
    d.add("a", range(8), max_tokens=5)
    d.start()
    d.add("b", range(8), max_tokens=5)
    assert d.start().new_requests[0].num_computed_tokens == 7  # although the step before is still in flight
    d.run()


def test_a_full_hit_without_a_block_for_the_copy_computes_the_last_block(driver, fakes):
    """Both blocks of the cache are the prompt's own; the copy would need a third."""
    d = driver(shape=fakes.shape(max_model_len=9), layout=fakes.layout(1 + 2, (4,)))
    assert cached(d, range(8)) == 0
    d.add("b", range(8), max_tokens=1)
    output = d.step()
    assert output.new_requests[0].num_computed_tokens == 4
    assert not output.block_copies
    d.run()


def test_the_source_of_a_copy_is_not_evicted_in_its_step(driver, fakes):
    """`c` takes every block that is left, but not the one that `b` copies from: it waits for that."""
    d = driver(layout=fakes.layout(1 + 6, (4,)), shape=fakes.shape(max_num_batched_tokens=64, max_model_len=20))
    cached(d, range(8))
    d.add("b", range(8), max_tokens=1)
    d.add("c", range(20, 36), max_tokens=1)
    output = d.step()
    ((source, _),) = output.block_copies
    assert [new.req_id for new in output.new_requests] == ["b"]
    assert d.step().new_requests[0].req_id == "c"
    d.run()
    assert source  # b's tokens were checked against what was copied


# Prompt logprobs


def test_prompt_logprobs_need_every_position_but_leave_blocks_for_others(driver):
    d = driver()
    assert cached(d, range(9), prompt_logprobs=2) == 0
    assert cached(d, range(9), prompt_logprobs=2) == 0
    assert cached(d, range(9)) == 8


def test_prompt_logprobs_are_computed_once(driver, fakes):
    """A request that is preempted after its first token comes back without them, and may then read the cache."""
    d = driver(layout=fakes.layout(1 + 5, (4,)), shape=fakes.shape(max_model_len=20))
    d.add("old", range(6), max_tokens=9)
    d.add("young", range(10, 18), max_tokens=6, prompt_logprobs=2)
    while "young" not in d.step().preempted_req_ids:
        pass
    d.run()
    first, back = (new for output in d.worker.outputs for new in output.new_requests if new.req_id == "young")
    assert first.sampling.prompt_logprobs == 2
    assert back.sampling.prompt_logprobs is None
    assert back.sampling.seed == first.sampling.seed
    assert back.num_computed_tokens > 0


def test_prompt_logprobs_that_did_not_all_arrive_are_computed_again(driver, fakes):
    """`young` is preempted in the middle of its prompt."""
    d = driver(layout=fakes.layout(1 + 12, (1,)), shape=fakes.shape(max_model_len=12, max_num_batched_tokens=3))
    d.add("old", range(5), max_tokens=7)
    d.add("young", range(20, 27), max_tokens=1, prompt_logprobs=2)
    d.run()
    news = [new for output in d.worker.outputs for new in output.new_requests if new.req_id == "young"]
    assert [(new.sampling.prompt_logprobs, new.num_computed_tokens) for new in news] == [(2, 0), (2, 0)]


# Preemption, abort, reset


def test_b102_what_is_computed_again_after_a_preemption_is_no_hit(driver, fakes):
    """Distinct prompts: nothing is found that another request left, although own blocks are found again."""
    d = driver(layout=fakes.layout(1 + 12, (4,)), shape=fakes.shape(max_model_len=40))
    for i in range(6):
        d.add(f"{i}", [i, *range(7)], max_tokens=14)
    d.run()
    assert d.count["preempted"] > 3
    assert d.count["resumed hits"] > 0
    assert d.scheduler.stats()["num_cached_tokens"] == 0
    assert set(d.cached.values()) == {0}


def test_each_prompt_is_counted_once(driver, fakes):
    d = driver(layout=fakes.layout(1 + 12, (4,)), shape=fakes.shape(max_model_len=40))
    for i in range(6):
        d.add(f"{i}", [*range(8), i], max_tokens=24)
    d.run()
    assert d.count["preempted"] > 3
    assert d.scheduler.stats()["num_cached_tokens"] == 5 * 8


@pytest.mark.parametrize("num_steps", [1, 2])
def test_blocks_of_an_aborted_request_stay_valid(driver, num_steps):
    """Its step was handed out, so they are written; a request may even share them before that step is collected."""
    d = driver(async_scheduling=True)
    d.add("a", range(12), max_tokens=9)
    for _ in range(num_steps):
        d.start()
    d.abort("a")
    d.add("b", range(12), max_tokens=2)
    d.run()
    assert d.cached["b"] == 11


def test_drafts_and_placeholders_are_not_published(driver, fakes):
    d = driver(shape=fakes.shape(num_speculative_tokens=4), async_scheduling=True, layout=fakes.layout(64, (1,)))
    d.add("a", [1], max_tokens=30)
    pool = d.scheduler._blocks._pool
    while d.live:
        output = d.start()
        known = [1, *d.live["a"][3]]
        assert {digest for _, digest in pool._keys.values()} <= set(digests(known, 1))
        if len(d.in_flight) == 2 or not output.num_scheduled_tokens:
            d.collect()
    assert len(pool._keys) > 10
    assert d.worker.num_drafts_accepted < d.worker.num_draft_tokens
    d.run()


def test_the_least_recently_used_prefix_is_evicted(driver, fakes):
    """Room for two finished prompts of 2 blocks (and one running); the one used last stays."""
    d = driver(layout=fakes.layout(1 + 6, (4,)), shape=fakes.shape(max_model_len=12))
    cached(d, range(9), "a")
    cached(d, range(20, 29), "b")
    assert cached(d, range(9), "a") == 8
    assert cached(d, range(30, 39), "c") == 0
    assert cached(d, range(40, 49), "d") == 0
    assert cached(d, [*range(4), 49, 49, 49, 49, 49], "e") == 4, "the head of a chain goes last"


def test_reset_prefix_cache(driver):
    d = driver()
    cached(d, range(9))
    d.forget()
    assert cached(d, range(9)) == 0
    assert cached(d, range(9)) == 8


def test_after_a_reset_running_requests_share_nothing_that_builds_on_old_contents(driver):
    d = driver()
    d.add("a", range(10), max_tokens=9)
    d.step()
    d.scheduler.reset_prefix_cache()
    d.run()
    assert cached(d, range(9)) == 0  # now the first two blocks are published anew
    history = [*range(10), *d.done["a"][0]]
    assert cached(d, history) == 8
    assert cached(d, history) == 16


# Admission


def test_found_blocks_that_nobody_holds_are_not_counted_twice(driver, fakes):
    """Six blocks: two are cached and free, `long` holds three. A request of 4 blocks that finds two needs four of the
    three that are free."""
    d = driver(layout=fakes.layout(1 + 6, (4,)), shape=fakes.shape(max_model_len=24, max_num_batched_tokens=64))
    cached(d, range(9))
    d.add("long", range(20, 31), max_tokens=2)
    d.step()
    assert d.scheduler.stats()["num_free_blocks"] == 3
    d.add("b", range(15), max_tokens=1)
    assert not d.step().new_requests
    d.run()
    assert d.cached["b"] == 8


def test_a_hit_admits_what_would_not_fit_alone(driver, fakes):
    d = driver(layout=fakes.layout(1 + 6, (4,)), shape=fakes.shape(max_model_len=24, max_num_batched_tokens=64))
    d.add("a", range(15), max_tokens=2)
    d.step()
    d.add("b", range(14), max_tokens=1)
    assert d.step().num_scheduled_tokens == {"a": 1, "b": 2}
    d.run()


def test_only_what_is_not_cached_counts_for_the_budget(driver, fakes):
    d = driver(shape=fakes.shape(max_num_batched_tokens=16), chunked_prefill=False)
    cached(d, range(13))
    for name in "abc":
        d.add(name, [*range(13), ord(name) % 50], max_tokens=2)
    assert d.step().num_scheduled_tokens == {"a": 2, "b": 2, "c": 2}
    d.run()


def test_without_chunks_a_hit_that_is_too_short_for_the_step_waits(driver, fakes):
    d = driver(shape=fakes.shape(max_num_batched_tokens=16), chunked_prefill=False)
    cached(d, range(8))
    d.add("a", range(20, 34), max_tokens=3)
    d.add("b", [*range(8), *range(40, 45)], max_tokens=1)
    assert d.step().num_scheduled_tokens == {"a": 14}
    assert d.step().num_scheduled_tokens == {"a": 1, "b": 5}
    d.run()
