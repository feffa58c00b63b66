import pytest

from millpond.core.block_pool import BlockPool, blocks_for_length, resolve_watermark_blocks
from millpond.errors import ConfigError, InvariantError


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_length_is_the_ceiling(num_tokens, blocks):
    assert blocks_for_length(num_tokens, 4) == blocks


def test_a_new_pool_is_all_free():
    pool = BlockPool(3)
    assert (pool.num_free, pool.free_block_ids) == (3, (0, 1, 2))
    assert [pool.ref_count(block) for block in range(3)] == [0, 0, 0]


def test_allocate_takes_blocks_with_one_holder_each():
    pool = BlockPool(3)
    assert pool.allocate(2) == [0, 1]
    assert pool.num_free == 1
    assert [pool.ref_count(block) for block in range(3)] == [1, 1, 0]


def test_no_room_is_none_and_takes_nothing():
    pool = BlockPool(3)
    pool.allocate(2)
    assert pool.allocate(2) is None
    assert pool.free_block_ids == (2,)


def test_allocating_nothing_is_an_empty_list_even_when_the_pool_is_full():
    pool = BlockPool(1)
    pool.allocate(1)
    assert pool.allocate(0) == []


def test_the_blocks_that_became_free_last_are_handed_out_first_and_in_the_order_they_were_held():
    pool = BlockPool(5)
    pool.allocate(4)
    pool.release([2])
    pool.release([0, 1])
    assert pool.free_block_ids == (0, 1, 2, 4)
    assert pool.allocate(4) == [0, 1, 2, 4]


def test_blocks_that_were_never_used_are_handed_out_in_order():
    pool = BlockPool(4)
    assert (pool.allocate(2), pool.allocate(2)) == ([0, 1], [2, 3])


def test_who_grows_gets_the_block_after_its_own():
    pool = BlockPool(24)
    pool.allocate(10)
    pool.release([3, 4])
    assert pool.allocate(3, after=2) == [3, 4, 16]
    assert pool.allocate(1, after=9) == [10]


def test_a_newcomer_gets_blocks_in_a_row_that_are_all_free_the_last_freed_first():
    pool = BlockPool(30)
    first, second, third = (pool.allocate(each) for each in (3, 8, 9))
    assert (first, second, third) == ([0, 1, 2], [*range(8, 16)], [*range(16, 25)])
    pool.release(second)
    assert pool.allocate(10) == [*second, 3, 4]
    assert pool.free_block_ids == (5, 6, 7, 25, 26, 27, 28, 29)


def test_findable_blocks_that_are_taken_together_come_in_their_order_in_memory():
    cache = Findable(range(4))
    pool = BlockPool(4, cache)
    pool.release(pool.allocate(4))
    assert pool.allocate(3) == [1, 2, 3]
    assert cache == {0}


def test_releasing_a_free_block_names_it():
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(InvariantError, match=r"block 2: 1 holders released, but it has 0"):
        pool.release([2])


def test_releasing_a_block_twice_in_one_call_changes_nothing():
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(InvariantError, match=r"block 1: 2 holders released, but it has 1"):
        pool.release([0, 1, 1])
    assert pool.num_free == 1
    assert [pool.ref_count(block) for block in range(3)] == [1, 1, 0]


@pytest.mark.parametrize("block_id", [-1, 3])
def test_a_block_that_is_not_in_the_pool_is_refused(block_id):
    pool = BlockPool(3)
    pool.allocate(3)
    with pytest.raises(InvariantError, match=rf"block {block_id} is not in a pool of 3 blocks"):
        pool.release([block_id])


def test_a_pool_has_at_least_one_block():
    with pytest.raises(ConfigError, match="num_blocks must be at least 1, got 0"):
        BlockPool(0)


class Findable(set):
    """A cache as the pool knows it."""

    forget = set.remove


def test_findable_blocks_are_handed_out_last_the_least_recently_used_first_and_then_forgotten():
    cache = Findable({0, 1, 3})
    pool = BlockPool(6, cache)
    first, second = pool.allocate(3), pool.allocate(2)
    pool.release(second)
    pool.release(first)
    # 2 was used last, 4 before it, 5 never; 3 can be found and became free first; of 0 and 1 the deeper goes first.
    assert pool.free_block_ids == (2, 4, 5, 3, 1, 0)
    assert pool.num_free == 6
    assert pool.allocate(4) == [2, 4, 5, 3]
    assert cache == {0, 1}
    assert pool.allocate(3) is None
    assert pool.free_block_ids == (1, 0)


def test_a_shared_block_is_free_again_when_its_last_holder_lets_go():
    pool = BlockPool(3, Findable({0}))
    pool.allocate(1)
    pool.release([0])
    pool.share([0])
    pool.share([0])
    assert (pool.ref_count(0), pool.num_free, pool.num_held([0, 1, 2])) == (2, 2, 1)
    assert pool.allocate(3) is None
    pool.release([0])
    assert pool.num_free == 2
    pool.release([0])
    assert pool.free_block_ids == (1, 2, 0)


def test_a_free_block_that_cannot_be_found_has_nothing_to_share():
    pool = BlockPool(3, Findable())
    with pytest.raises(InvariantError, match="block 1 is free and cannot be found"):
        pool.share([1])


@pytest.mark.parametrize(("num_blocks", "reserve"), [(1, 0), (99, 0), (100, 1), (199, 1), (200, 2), (5000, 50)])
def test_the_share_is_rounded_down_to_whole_blocks(num_blocks, reserve):
    assert resolve_watermark_blocks(num_blocks, 0.01) == reserve


def test_a_reserve_in_blocks_wins_over_the_share():
    assert resolve_watermark_blocks(1000, 0.5, 3) == 3
    assert resolve_watermark_blocks(1000, 0.5, 0) == 0


@pytest.mark.parametrize("reserve", [-1, 8, 9])
def test_a_reserve_outside_the_pool_is_refused_with_both_numbers(reserve):
    with pytest.raises(ConfigError, match=rf"below the 8 blocks of the pool, got {reserve}"):
        resolve_watermark_blocks(8, 0.01, reserve)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_that_is_not_a_share_is_refused(share):
    with pytest.raises(ConfigError, match="watermark must be at least 0 and below 1"):
        resolve_watermark_blocks(8, share)
