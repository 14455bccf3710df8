"""Interleavings within one plan, one by one; what each would break stands in the name."""

import pytest

from gpu_worker.engine.block_pool import BlockAccountingError, BlockPool
from gpu_worker.engine.kv_memory import KvMemory
from gpu_worker.engine.sequence import NO_MOVES
from service_kit.prefix_hash import BlockHash, digest_of

A, B, C, D = (BlockHash(name.encode().ljust(16)) for name in "ABCD")


def make_memory(*, num_blocks, num_host_blocks=0):
    return KvMemory(pool=BlockPool(num_blocks=num_blocks, block_size=16), num_host_blocks=num_host_blocks)


def fill(memory, *names):
    """Computes content in one plan and lets it go; returns the blocks."""
    blocks = memory.allocate(len(names))
    memory.take_moves()
    for block, name in zip(blocks, names, strict=True):
        memory.publish(block, name)
    memory.release(blocks)
    return blocks


def acquire(memory, *names, is_last_private=False):
    return memory.acquire(names, memory.find(names), is_last_private=is_last_private)


def test_evicted_content_is_saved_and_loaded_again():
    memory = make_memory(num_blocks=1, num_host_blocks=1)
    (block,) = fill(memory, A)
    memory.release(memory.allocate(1))
    assert memory.take_moves().to_host == ((block, 0),)
    assert memory.find([A]) == [None]
    assert acquire(memory, A) == [block]
    assert memory.take_moves().from_host == ((0, block),)
    assert memory.find([A]) == [block]
    assert (memory.num_blocks_to_host, memory.num_blocks_from_host) == (1, 1)


def test_without_a_host_tier_evicted_content_is_gone():
    memory = make_memory(num_blocks=1)
    fill(memory, A)
    memory.allocate(1)
    assert memory.take_moves() is NO_MOVES
    assert memory.find([A]) == []


def test_content_that_the_host_has_is_not_saved_twice():
    memory = make_memory(num_blocks=1, num_host_blocks=2)
    fill(memory, A)
    memory.release(memory.allocate(1))
    memory.take_moves()
    memory.release(acquire(memory, A))
    memory.take_moves()
    memory.allocate(1)
    assert memory.take_moves() is NO_MOVES
    assert memory.find([A]) == [None]


def test_a_host_block_that_is_read_in_a_plan_is_not_overwritten_in_it():
    memory = make_memory(num_blocks=2, num_host_blocks=1)
    fill(memory, A)
    memory.allocate(1)  # the block without content
    memory.release(memory.allocate(1))  # evicts A
    memory.take_moves()
    fill(memory, B)
    assert memory.find([A]) == [None]
    acquire(memory, A)  # takes the block of B, which could only be saved over A
    moves = memory.take_moves()
    assert (len(moves.from_host), moves.to_host) == (1, ())
    assert memory.find([B]) == []


def test_a_host_block_is_written_once_per_plan():
    memory = make_memory(num_blocks=2, num_host_blocks=1)
    _, later = fill(memory, A, B)
    memory.allocate(2)
    assert memory.take_moves().to_host == ((later, 0),)
    assert (memory.find([A]), memory.find([B])) == ([], [None])


def test_content_saved_in_a_plan_can_be_loaded_in_the_same_plan():
    memory = make_memory(num_blocks=2, num_host_blocks=1)
    other, block = fill(memory, B, A)
    memory.acquire([B], [other], is_last_private=False)
    memory.allocate(1)  # evicts A
    memory.release([other])
    (loaded,) = acquire(memory, A)
    moves = memory.take_moves()
    assert (moves.to_host, moves.from_host, loaded) == (((block, 0),), ((0, other),), other)


def test_found_blocks_are_held_before_blocks_are_taken_for_the_others():
    memory = make_memory(num_blocks=2, num_host_blocks=2)
    first, second = fill(memory, B, A)
    assert memory.allocate(1) == [second]  # evicts A
    memory.take_moves()
    memory.release([second])
    # B is the least recently used content, and the next block that is taken would be its.
    fill(memory, C)
    assert memory.find([B, A]) == [first, None]
    assert acquire(memory, B, A) == [first, second]


def test_a_copy_is_private_and_its_source_stays_until_the_plan_is_made():
    memory = make_memory(num_blocks=3)
    source, other = fill(memory, A, B)
    table = acquire(memory, A, is_last_private=True)
    assert memory.allocate(1) == [other], "the source must not be taken though nobody else holds it"
    with pytest.raises(BlockAccountingError):
        memory.check_integrity([table, [other]])
    assert memory.take_moves().duplicated == ((source, table[0]),)
    memory.check_integrity([table, [other]])
    assert memory.find([A]) == [source]
    assert not memory.is_named(table[0])


def test_a_private_last_block_from_the_host_is_loaded_without_a_copy():
    memory = make_memory(num_blocks=1, num_host_blocks=1)
    (block,) = fill(memory, A)
    memory.release(memory.allocate(1))
    memory.take_moves()
    assert acquire(memory, A, is_last_private=True) == [block]
    moves = memory.take_moves()
    assert (moves.from_host, moves.duplicated) == (((0, block),), ())
    assert not memory.is_named(block)


def test_a_block_loaded_in_a_plan_can_be_shared_and_copied_in_it():
    memory = make_memory(num_blocks=2, num_host_blocks=1)
    fill(memory, A)
    memory.release(memory.allocate(2))
    memory.take_moves()
    (loaded,) = acquire(memory, A)
    assert acquire(memory, A) == [loaded]
    (copy,) = acquire(memory, A, is_last_private=True)
    moves = memory.take_moves()
    assert (moves.from_host, moves.duplicated) == (((0, loaded),), ((loaded, copy),))


def test_a_block_that_is_taken_again_loses_its_load_and_is_not_saved_before_it_is_filled():
    memory = make_memory(num_blocks=1, num_host_blocks=2)
    fill(memory, A)
    memory.release(memory.allocate(1))
    memory.take_moves()
    memory.release(acquire(memory, A))
    memory.allocate(1)
    assert memory.take_moves() is NO_MOVES
    assert memory.find([A]) == [None]


def test_a_copy_that_is_given_up_in_its_plan_is_not_made_once_its_block_is_taken_again():
    memory = make_memory(num_blocks=2)
    fill(memory, A)
    memory.release(acquire(memory, A, is_last_private=True))
    memory.allocate(1)
    assert memory.take_moves().duplicated == ()


def test_the_first_block_of_a_content_keeps_the_name():
    memory = make_memory(num_blocks=2)
    first, second = memory.allocate(2)
    memory.publish(first, A)
    memory.publish(second, A)
    assert memory.find([A]) == [first]
    memory.release([second])
    memory.release([first])
    memory.check_integrity([])
    assert memory.allocate(1) == [second], "content that cannot be found goes first"


def test_later_blocks_of_a_sequence_are_evicted_before_its_earlier_ones():
    memory = make_memory(num_blocks=3)
    blocks = fill(memory, A, B, C)
    assert memory.allocate(2) == [blocks[2], blocks[1]]
    assert memory.find([A, B, C]) == [blocks[0]]


def test_dropping_forgets_what_nobody_holds_and_the_host():
    memory = make_memory(num_blocks=2, num_host_blocks=2)
    fill(memory, A)
    memory.release(memory.allocate(2))
    memory.take_moves()
    held, _ = fill(memory, B, C)
    acquire(memory, B)
    memory.take_changes()
    memory.drop_unheld()
    assert [memory.find([name]) for name in (A, B, C)] == [[], [held], []]
    assert set(memory.take_changes().removed) == {digest_of(A), digest_of(C)}
    memory.check_integrity([[held]])


def test_content_that_moves_to_the_host_and_back_is_no_change():
    memory = make_memory(num_blocks=1, num_host_blocks=1)
    fill(memory, A)
    assert memory.take_changes().added == (digest_of(A),)
    memory.release(memory.allocate(1))
    memory.take_moves()
    memory.release(acquire(memory, A))
    memory.take_moves()
    changes = memory.take_changes()
    assert (changes.added, changes.removed) == ((), ())


def test_content_that_came_and_went_between_two_reports_is_no_change():
    memory = make_memory(num_blocks=1)
    fill(memory, A)
    fill(memory, B)
    assert memory.take_changes().added == (digest_of(B),)
    fill(memory, C)
    changes = memory.take_changes()
    assert (changes.added, changes.removed) == ((digest_of(C),), (digest_of(B),))


def test_a_report_is_bounded_and_the_rest_comes_with_the_next(monkeypatch):
    monkeypatch.setattr("gpu_worker.engine.cache_changes.MAX_CHANGES_PER_REPORT", 3)
    memory = make_memory(num_blocks=4)
    fill(memory, A, B, C, D)
    assert [len(memory.take_changes().added) for _ in range(3)] == [3, 1, 0]
