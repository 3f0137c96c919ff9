import pytest

from workerkit.components.engine.block_pool import BlockPool
from workerkit.framework.errors import CacheError, IntegrityError


def test_every_block_but_the_null_block_is_handed_out_once():
    pool = BlockPool(8)
    blocks = pool.allocate(3) + pool.allocate(4)
    assert sorted(blocks) == [1, 2, 3, 4, 5, 6, 7]
    assert pool.num_free == 0


def test_a_short_pool_hands_out_nothing():
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(CacheError, match=r"2 blocks .* 1 are free"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_b59_double_free_is_found():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.free(blocks)
    assert pool.num_free == 3
    with pytest.raises(IntegrityError, match="freed twice"):
        pool.free(blocks)
    with pytest.raises(IntegrityError, match="freed twice"):
        pool.free([3])  # never handed out


@pytest.mark.parametrize("block", [0, 4, -1])
def test_the_null_block_and_foreign_blocks_cannot_be_freed(block):
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(IntegrityError, match=f"block {block} "):
        pool.free([block])


def published(pool, count):
    """That many blocks, held, with contents 0, 1, …"""
    blocks = pool.allocate(count)
    for number, block in enumerate(blocks):
        assert pool.publish(block, (0, bytes([number])))
    return blocks


def found(pool, count):
    return [pool.find((0, bytes([number]))) for number in range(count)]


def test_free_blocks_keep_their_content_until_they_are_handed_out():
    pool = BlockPool(5)
    blocks = published(pool, 2)
    pool.free(blocks)
    assert pool.num_free == 4
    assert found(pool, 2) == blocks
    assert pool.allocate(2) == [3, 4]  # the empty ones
    assert found(pool, 2) == blocks
    pool.allocate(1)
    assert found(pool, 2) == [blocks[0], None]


def test_of_a_chain_the_tail_is_evicted_first():
    pool = BlockPool(4)
    blocks = published(pool, 3)
    pool.free(blocks)
    assert [pool.allocate(1)[0] for _ in range(3)] == blocks[::-1]


def test_the_least_recently_used_content_is_evicted_first():
    pool = BlockPool(5)
    a, b, c, d = published(pool, 4)
    for block in (b, d, a, c):
        pool.free([block])
    pool.acquire([b])  # used again
    pool.free([b])
    assert [pool.allocate(1)[0] for _ in range(4)] == [d, a, c, b]
    assert found(pool, 4) == [None] * 4


def test_a_shared_block_is_free_after_its_last_holder():
    pool = BlockPool(4)
    (block,) = published(pool, 1)
    pool.acquire([block])
    pool.free([block])
    assert pool.num_free == 2
    pool.check_integrity([block])
    pool.free([block])
    assert pool.num_free == 3
    with pytest.raises(IntegrityError, match="freed twice"):
        pool.free([block])


def test_acquired_blocks_leave_the_free_count_once():
    pool = BlockPool(4)
    blocks = published(pool, 2)
    pool.free(blocks)
    assert pool.count_free(blocks) == 2
    pool.acquire(blocks)
    pool.acquire(blocks)
    assert pool.count_free(blocks) == 0
    assert pool.num_free == 1
    with pytest.raises(CacheError, match=r"2 blocks .* 1 are free"):
        pool.allocate(2)


def test_only_published_content_is_shared():
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    for unpublished in (block, 3):
        with pytest.raises(IntegrityError, match="no published content"):
            pool.acquire([unpublished])


def test_the_first_block_with_a_content_stays():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    assert pool.publish(first, (0, b"x"))
    assert not pool.publish(second, (0, b"x"))
    assert pool.publish(second, (1, b"x")), "another group"
    assert pool.find((0, b"x")) == first
    assert pool.find((1, b"x")) == second


@pytest.mark.parametrize("block", [1, 2])
def test_only_held_blocks_are_published_and_once(block):
    pool = BlockPool(4)
    published(pool, 1)
    with pytest.raises(IntegrityError, match=r"not held, or .* published already"):
        pool.publish(block, (0, b"other"))


def test_private_blocks_may_be_written():
    pool = BlockPool(4)
    block, other = pool.allocate(2)
    assert pool.is_private(block)
    pool.publish(block, (0, b"x"))
    assert not pool.is_private(block)
    assert pool.is_private(other)


def test_forgotten_contents_are_not_found_and_no_block_is_lost():
    pool = BlockPool(5)
    a, b, c = published(pool, 3)
    pool.free([a, c])
    pool.forget_contents()
    assert found(pool, 3) == [None] * 3
    assert pool.num_free == 3
    pool.check_integrity([b])
    pool.free([b])
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]


def test_check_integrity():
    pool = BlockPool(5)
    blocks = published(pool, 3)
    pool.acquire(blocks[:1])
    pool.check_integrity([*blocks, blocks[0]])
    with pytest.raises(IntegrityError, match=r"'lost': \[1\]"):
        pool.check_integrity(blocks)
    with pytest.raises(IntegrityError, match=r"'lost': \[3\]"):
        pool.check_integrity([1, 1, 2])
    with pytest.raises(IntegrityError, match=r"'held too often': \[2\]"):
        pool.check_integrity([1, 1, 2, 2, 3])
    with pytest.raises(IntegrityError, match=r"'held too often': \[4\]"):
        pool.check_integrity([1, 1, 2, 3, 4])
    with pytest.raises(IntegrityError, match=r"'foreign': \[9\]"):
        pool.check_integrity([1, 1, 2, 3, 9])
    pool._empty.append(2)
    with pytest.raises(IntegrityError, match=r"'free, but not once': \[2\]"):
        pool.check_integrity([1, 1, 2, 3])
