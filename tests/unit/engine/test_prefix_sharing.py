import pytest

from gpu_worker.engine.sequence_blocks import SequenceBlocks
from tests.support.step_runs import (
    BATCH,
    INTERACTIVE,
    OTHER_ROOT,
    STANDARD,
    finish_step,
    make_scheduler,
    make_sequence,
    run_step,
)

PREFIX = list(range(100, 124))  # six blocks of four


def run_to_end(scheduler, sequence):
    """Runs a sequence alone until its prompt is computed, and removes it."""
    scheduler.add(sequence)
    while sequence.num_tokens == sequence.num_prompt_tokens:
        run_step(scheduler)
    scheduler.remove(sequence.sequence_id)


def test_full_blocks_of_a_prompt_are_computed_once():
    scheduler = make_scheduler()
    run_to_end(scheduler, make_sequence("first", [*PREFIX, 1, 2]))
    second = make_sequence("second", [*PREFIX, 3, 4, 5])
    scheduler.add(second)
    assert run_step(scheduler) == {"second": 3}
    assert second.num_cached_tokens == 24
    assert (scheduler.num_computed_prompt_tokens, scheduler.num_cached_prompt_tokens) == (26 + 3, 24)


def test_two_roots_share_nothing():
    scheduler = make_scheduler()
    run_to_end(scheduler, make_sequence("first", PREFIX))
    for number, root in enumerate((OTHER_ROOT, None)):
        scheduler.add(make_sequence(f"{number}", PREFIX, root=root))
        assert run_step(scheduler)[f"{number}"] == 24


def test_running_sequences_hold_shared_blocks_together():
    scheduler = make_scheduler()
    first, second = make_sequence("first", [*PREFIX, 1]), make_sequence("second", [*PREFIX, 2])
    scheduler.add(first)
    run_step(scheduler)
    scheduler.add(second)
    run_step(scheduler)
    assert first.block_table[:6] == second.block_table[:6]
    assert first.block_table[6] != second.block_table[6]
    assert scheduler.num_computed_tokens == 24 + 2 + 1


def test_a_fully_cached_prompt_computes_its_last_token_in_a_copy_of_its_last_block():
    scheduler = make_scheduler()
    first = make_sequence("first", PREFIX)
    scheduler.add(first)
    run_step(scheduler)
    scheduler.add(make_sequence("second", PREFIX))
    plan = scheduler.schedule()
    (planned,) = (planned for planned in plan.sequences if planned.sequence_id == "second")
    assert (planned.start, planned.token_ids, planned.is_sampled) == (23, (123,), True)
    assert planned.block_table[:5] == tuple(first.block_table[:5])
    assert plan.moves.duplicated == ((first.block_table[5], planned.block_table[5]),)
    finish_step(scheduler, plan)
    assert scheduler.num_computed_prompt_tokens == 25


def test_a_fully_cached_prompt_without_a_block_for_the_copy_computes_its_last_block():
    scheduler = make_scheduler(num_blocks=6)
    run_to_end(scheduler, make_sequence("first", PREFIX, output=1))
    scheduler.add(make_sequence("second", PREFIX, output=1))
    plan = scheduler.schedule()
    assert [(planned.start, len(planned.token_ids)) for planned in plan.sequences] == [(20, 4)]
    assert plan.moves.duplicated == ()


def test_output_is_found_by_a_sequence_that_continues_it():
    scheduler = make_scheduler()
    first = make_sequence("first", [1, 2, 3])
    scheduler.add(first)
    for _ in range(10):
        run_step(scheduler)
    scheduler.remove("first")
    scheduler.add(make_sequence("continued", first.token_ids))
    assert run_step(scheduler) == {"continued": 1}


def test_a_preempted_sequence_comes_back_through_the_cache():
    scheduler = make_scheduler(num_blocks=12)
    victim = make_sequence("victim", PREFIX, output=8, priority=BATCH)
    scheduler.add(victim)
    for _ in range(5):
        run_step(scheduler)
    scheduler.add(make_sequence("urgent", range(20), output=4, priority=INTERACTIVE))
    assert scheduler.schedule().preempted == ("victim",)
    scheduler.remove("urgent")
    assert victim.num_tokens == 29
    assert run_step(scheduler) == {"victim": 1}
    assert victim.num_cached_tokens == 0, "usage counts what was found when it came, not when it came back"


def test_blocks_are_findable_only_after_they_were_computed():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("first", PREFIX))
    plan = scheduler.schedule()
    assert scheduler.num_cached_blocks == 0
    finish_step(scheduler, plan)
    assert scheduler.num_cached_blocks == 6


def test_the_blocks_of_a_failed_step_are_never_found():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("fails", PREFIX))
    plan = scheduler.schedule()
    scheduler.remove("fails")
    scheduler.update(plan, {})
    assert scheduler.num_cached_blocks == 0
    scheduler.add(make_sequence("next", PREFIX))
    assert run_step(scheduler) == {"next": 24}


def test_what_a_discarded_sequence_computed_before_is_never_found_again():
    scheduler = make_scheduler(num_blocks=12, num_host_blocks=8)
    run_to_end(scheduler, make_sequence("evicted to the host", PREFIX[:16], output=2))
    run_to_end(scheduler, make_sequence("evicts", range(40), output=2))
    scheduler.add(make_sequence("suspect", [*PREFIX, 1], output=4))
    assert run_step(scheduler) == {"suspect": 9}
    scheduler.add(make_sequence("shares", [*PREFIX, 2], output=9))
    assert run_step(scheduler) == {"suspect": 1, "shares": 1}
    num_cached = scheduler.num_cached_blocks
    scheduler.discard("suspect")
    scheduler.check_integrity()
    assert scheduler.num_cached_blocks == num_cached - 6
    assert run_step(scheduler) == {"shares": 1}, "whoever holds the blocks goes on"
    scheduler.remove("shares")
    scheduler.add(make_sequence("next", [*PREFIX, 3], output=4))
    assert run_step(scheduler) == {"next": 25}


def test_sixteen_sequences_with_a_common_prefix_compute_it_once_when_one_came_before():
    scheduler = make_scheduler(num_blocks=500, block_size=16, max_running=16, token_budget=256, long_prefill_tokens=256)
    prefix = list(range(1000))
    run_to_end(scheduler, make_sequence("first", [*prefix, 5000, 5001]))
    _compute_fifteen_more(scheduler, prefix)


def test_sixteen_sequences_with_a_common_prefix_compute_it_once_when_all_come_together():
    scheduler = make_scheduler(num_blocks=500, block_size=16, max_running=16, token_budget=256, long_prefill_tokens=256)
    prefix = list(range(1000))
    scheduler.add(make_sequence("first", [*prefix, 5000, 5001]))
    _compute_fifteen_more(scheduler, prefix)


def _compute_fifteen_more(scheduler, prefix):
    sequences = [make_sequence(f"{number}", [*prefix, *range(6000 + number, 6020 + number)]) for number in range(15)]
    for sequence in sequences:
        scheduler.add(sequence)
    while any(sequence.num_tokens == sequence.num_prompt_tokens for sequence in sequences):
        run_step(scheduler)
    assert scheduler.num_computed_prompt_tokens <= 1.1 * (1000 + 2 + 15 * 20)
    assert scheduler.num_cached_prompt_tokens == 15 * 992


def add_owner_and_waiter(scheduler, *, owner=STANDARD, waiter=STANDARD):
    """An owner that has computed half of the prefix, and somebody who wants all of it."""
    scheduler.add(make_sequence("owner", [*PREFIX, 1], priority=owner))
    assert run_step(scheduler) == {"owner": 12}
    scheduler.add(make_sequence("waiter", [*PREFIX, 2], priority=waiter))


def make_slow_scheduler(**limits):
    return make_scheduler(token_budget=12, max_running=4, long_prefill_tokens=12, **limits)


def test_a_sequence_waits_for_blocks_that_are_being_computed_and_others_pass():
    scheduler = make_slow_scheduler()
    add_owner_and_waiter(scheduler)
    scheduler.add(make_sequence("other", [9]))
    assert run_step(scheduler) == {"owner": 12}
    assert run_step(scheduler) == {"owner": 1, "waiter": 1, "other": 1}


def test_a_herd_behind_one_prefix_is_looked_up_in_parts_and_once(monkeypatch):
    lookups = []
    find = SequenceBlocks.find

    def count(blocks, sequence):
        lookups.append(sequence.sequence_id)
        return find(blocks, sequence)

    monkeypatch.setattr(SequenceBlocks, "find", count)
    scheduler = make_scheduler(num_blocks=2000, block_size=4, max_running=4, token_budget=32, long_prefill_tokens=16)
    prefix = [7] * 200
    scheduler.add(make_sequence("owner", prefix, output=1))
    for number in range(200):
        scheduler.add(make_sequence(f"herd {number}", [*prefix, number], output=1))
    scheduler.add(make_sequence("other", range(9), output=9))
    num_looked_up = []
    for _ in range(5):
        lookups.clear()
        run_step(scheduler)
        num_looked_up.append(len(lookups))
    assert num_looked_up == [65, 64, 64, 9, 0], "the owner; the herd, which then waits; at last the one behind it"
    assert scheduler.num_running == 2


def test_others_pass_a_waiting_sequence_in_the_same_step():
    scheduler = make_slow_scheduler()
    scheduler.add(make_sequence("owner", PREFIX[:9]))
    scheduler.add(make_sequence("waiter", PREFIX[:9]))
    scheduler.add(make_sequence("other", [9]))
    assert run_step(scheduler) == {"owner": 9, "other": 1}
    assert run_step(scheduler) == {"owner": 1, "other": 1, "waiter": 1}


def test_a_waiter_goes_on_when_the_owner_is_removed():
    scheduler = make_slow_scheduler()
    add_owner_and_waiter(scheduler)
    plan = scheduler.schedule()
    assert [planned.sequence_id for planned in plan.sequences] == ["owner"]
    scheduler.remove("owner")
    scheduler.update(plan, {})
    assert run_step(scheduler) == {"waiter": 12}
    assert run_step(scheduler) == {"waiter": 1}


def test_a_waiter_goes_on_when_the_owner_is_preempted():
    scheduler = make_slow_scheduler(num_blocks=12)
    add_owner_and_waiter(scheduler, owner=BATCH, waiter=BATCH)
    scheduler.add(make_sequence("urgent", range(30, 60), output=1, priority=INTERACTIVE))
    plan = scheduler.schedule()
    assert plan.preempted == ("owner",)
    assert finish_step(scheduler, plan) == {"urgent": 12}
    scheduler.remove("owner")
    scheduler.remove("urgent")
    assert run_step(scheduler) == {"waiter": 12}


def test_a_preempted_owner_and_its_waiter_both_end():
    scheduler = make_slow_scheduler(num_blocks=12)
    add_owner_and_waiter(scheduler, owner=BATCH, waiter=BATCH)
    scheduler.add(make_sequence("urgent", range(30, 60), output=1, priority=INTERACTIVE))
    assert run_step(scheduler) == {"urgent": 12}
    scheduler.remove("urgent")
    assert run_step(scheduler) == {"owner": 12}
    assert run_step(scheduler) == {"owner": 1, "waiter": 1}


def test_a_higher_class_does_not_wait_for_a_lower_one():
    scheduler = make_slow_scheduler()
    add_owner_and_waiter(scheduler, owner=BATCH, waiter=STANDARD)
    assert run_step(scheduler) == {"waiter": 12}
    assert run_step(scheduler) == {"waiter": 1, "owner": 11}


def test_a_lower_class_waits_for_a_higher_one():
    scheduler = make_slow_scheduler()
    add_owner_and_waiter(scheduler, owner=INTERACTIVE, waiter=BATCH)
    assert run_step(scheduler) == {"owner": 12}


def test_waiters_in_a_chain_all_end_when_memory_is_short():
    scheduler = make_slow_scheduler(num_blocks=8)
    sequences = [make_sequence(f"{end}", PREFIX[:end], output=4) for end in (8, 12, 16, 20, 24)]
    for sequence in sequences:
        scheduler.add(sequence)
    live = {sequence.sequence_id: sequence for sequence in sequences}
    for _ in range(60):
        run_step(scheduler)
        for name, sequence in list(live.items()):
            if sequence.num_tokens == sequence.max_total_tokens:
                scheduler.remove(name)
                del live[name]
        if not live:
            return
    pytest.fail(f"{live.keys()} do not end")


def test_content_comes_back_from_the_host():
    scheduler = make_scheduler(num_blocks=8, num_host_blocks=8)
    run_to_end(scheduler, make_sequence("first", PREFIX, output=4))
    run_to_end(scheduler, make_sequence("evicts", range(30), output=2))
    scheduler.add(make_sequence("second", [*PREFIX, 1], output=4))
    assert run_step(scheduler) == {"second": 1}
    assert (scheduler.num_blocks_to_host, scheduler.num_blocks_from_host) == (8, 6), (
        "of what it evicts, two blocks fit beside the six it loads"
    )


def test_room_counts_free_blocks_and_those_that_only_lower_classes_hold():
    scheduler = make_scheduler(num_blocks=30)
    scheduler.add(make_sequence("batch", [*PREFIX, 1], priority=BATCH))
    run_step(scheduler)
    assert scheduler.room_blocks == (30, 30, 23)
    scheduler.add(make_sequence("standard", [*PREFIX, 2, 2], priority=STANDARD))
    run_step(scheduler)
    assert scheduler.room_blocks == (30, 23, 22), "the prefix is held by both"
    scheduler.remove("batch")
    assert scheduler.room_blocks == (30, 23, 23)


def test_what_waits_before_a_class_takes_its_room():
    scheduler = make_scheduler(num_blocks=30, max_running=1)
    scheduler.add(make_sequence("running", PREFIX, priority=STANDARD))
    scheduler.add(make_sequence("waiting", range(40), priority=STANDARD))
    run_step(scheduler)
    assert scheduler.room_blocks == (30, 14, 14)
    scheduler.remove("waiting")
    assert scheduler.room_blocks == (30, 24, 24)


def test_dropping_the_cache_after_failed_moves_leaves_nothing_of_them():
    scheduler = make_scheduler(num_blocks=8, num_host_blocks=8)
    run_to_end(scheduler, make_sequence("first", PREFIX, output=4))
    run_to_end(scheduler, make_sequence("evicts", range(30), output=2))
    scheduler.add(make_sequence("second", [*PREFIX, 1], output=4))
    assert scheduler.schedule().moves
    scheduler.remove("second")
    scheduler.drop_cached()
    assert scheduler.num_cached_blocks == 0
    scheduler.add(make_sequence("third", [*PREFIX, 1], output=4))
    assert run_step(scheduler) == {"third": 25}
