import pytest

from gpu_worker.engine.block_pool import BlockAccountingError, BlockPool, OutOfBlocksError


def make_pool(num_blocks=4):
    return BlockPool(num_blocks=num_blocks, block_size=16)


def test_allocating_more_than_is_free_takes_nothing():
    pool = make_pool()
    pool.allocate(3)
    with pytest.raises(OutOfBlocksError, match="2 blocks asked for, 1 are free"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_a_shared_block_is_free_only_after_its_last_holder():
    pool = make_pool()
    (block,) = pool.allocate(1)
    pool.share(block)
    pool.release([block])
    assert pool.num_free == 3
    pool.release([block])
    assert pool.num_free == 4


def test_releasing_a_free_block_is_an_error():
    pool = make_pool()
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(BlockAccountingError, match=f"block {block} was released"):
        pool.release([block])


def test_sharing_a_free_block_is_an_error():
    with pytest.raises(BlockAccountingError, match="block 2 is free"):
        make_pool().share(2)


def test_content_can_be_shared_again_until_its_block_is_taken():
    pool = make_pool(num_blocks=1)
    (block,) = pool.allocate(1)
    pool.keep(block)
    pool.release([block])
    assert pool.num_free == 1
    pool.share(block)
    pool.release([block])
    pool.allocate(1)
    pool.release([block])
    with pytest.raises(BlockAccountingError, match="free"):
        pool.share(block)


def test_blocks_without_content_are_taken_first_and_then_the_least_recently_released():
    pool = make_pool(num_blocks=5)
    a, b, c, d, e = pool.allocate(5)
    for block in (a, b, c):
        pool.keep(block)
    pool.release([c])
    pool.release([a, b])
    pool.release([d, e])
    pool.share(c)
    pool.release([c])
    assert pool.allocate(5) == [e, d, a, b, c]


def test_forgotten_content_cannot_be_shared():
    pool = make_pool()
    held, unheld = pool.allocate(2)
    pool.keep(held)
    pool.keep(unheld)
    pool.release([unheld])
    assert pool.forget_unheld() == [unheld]
    assert pool.is_kept(held)
    with pytest.raises(BlockAccountingError, match="free"):
        pool.share(unheld)
    pool.check_integrity()


def test_a_free_block_has_no_content_to_keep():
    with pytest.raises(BlockAccountingError, match="block 0 is free"):
        make_pool().keep(0)


def test_the_block_released_last_is_taken_first():
    pool = make_pool()
    first, second = pool.allocate(2)
    pool.release([second])
    pool.release([first])
    assert pool.allocate(2) == [first, second]


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (250, 16)])
def test_tokens_need_whole_blocks(num_tokens, num_blocks):
    assert make_pool().num_blocks_for(num_tokens) == num_blocks


def test_integrity_check_finds_a_held_block_in_the_free_list():
    pool = make_pool()
    (block,) = pool.allocate(1)
    pool._blank.append(block)
    with pytest.raises(BlockAccountingError, match=f"block {block}"):
        pool.check_integrity()
