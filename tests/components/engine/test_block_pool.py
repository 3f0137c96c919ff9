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


def test_check_integrity():
    pool = BlockPool(5)
    blocks = pool.allocate(3)
    pool.check_integrity(blocks)
    with pytest.raises(IntegrityError, match=r"'lost': \[3\]"):
        pool.check_integrity([1, 2])
    with pytest.raises(IntegrityError, match=r"'held twice': \[2\]"):
        pool.check_integrity([1, 2, 2, 3])
    with pytest.raises(IntegrityError, match=r"'held twice': \[4\]"):
        pool.check_integrity([1, 2, 3, 4])
    with pytest.raises(IntegrityError, match=r"'foreign': \[9\]"):
        pool.check_integrity([1, 2, 3, 9])
