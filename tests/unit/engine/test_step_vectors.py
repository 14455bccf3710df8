"""Numbers that follow from the arithmetic of blocks and steps, on the real pool and scheduler."""

import random
from statistics import mean

import pytest

from gpu_worker.engine.sequence import SequenceState
from gpu_worker.engine.step_scheduler import StepLimits
from tests.support.step_runs import finish_step, make_scheduler, make_sequence, run_all, run_step

BYTES_PER_TOKEN = 2 * 40 * 40 * 128 * 2
"""Keys and values of 40 layers with 40 heads of 128 in 16 bits: 819,200."""
BLOCK_SIZE = 16


def blocks_in(gigabytes):
    return gigabytes * 10**9 // (BYTES_PER_TOKEN * BLOCK_SIZE)


def test_two_slots_serve_2_8_2_2_tokens_in_8_steps_and_never_wait_for_a_whole_batch():
    sequences = [make_sequence(f"{number}", [number]) for number in range(1, 5)]
    needs = {"1": 2, "2": 8, "3": 2, "4": 2}
    ends, plans = run_all(make_scheduler(max_running=2), {name: 1 + need for name, need in needs.items()}, sequences)
    assert ends == {"1": 2, "3": 4, "4": 6, "2": 8}
    assert sum(len(plan.sequences) for plan in plans) / (2 * len(plans)) == 0.875


def test_whole_batches_would_take_10_steps_at_70_percent():
    """The same scheduler when the second pair comes only after the first has returned."""
    num_steps = num_rows = 0
    for needs in ({"1": 2, "2": 8}, {"3": 2, "4": 2}):
        sequences = [make_sequence(name, [int(name)]) for name in needs]
        ends, plans = run_all(
            make_scheduler(max_running=2), {name: 1 + need for name, need in needs.items()}, sequences
        )
        returned = num_steps + max(ends.values())
        num_steps += len(plans)
        num_rows += sum(len(plan.sequences) for plan in plans)
    assert (num_steps, num_rows / (2 * num_steps), returned) == (10, 0.7, 10)


def test_250_tokens_use_16_blocks_with_6_slots_unused():
    scheduler = make_scheduler(block_size=16, token_budget=512, long_prefill_tokens=512)
    sequence = make_sequence("a", range(250))
    scheduler.add(sequence)
    run_step(scheduler)
    assert len(sequence.block_table) == 16
    assert len(sequence.block_table) * 16 - scheduler.num_computed_tokens == 6


def fill(*, num_blocks, prompt, until, output=40, growth_ratio=0.0):
    """Sequences that run together when each has `until` tokens in memory; more of them wait than can come in."""
    limits = {"max_running": 200, "token_budget": 10**6, "max_long_prefills": 200, "long_prefill_tokens": 4096}
    limits |= {"initial_growth_ratio": growth_ratio, "min_growth_ratio": growth_ratio}
    scheduler = make_scheduler(num_blocks=num_blocks, block_size=BLOCK_SIZE, **limits)
    sequences = [make_sequence(f"{number}", [number] * prompt, output=output, root=None) for number in range(200)]
    for sequence in sequences:
        scheduler.add(sequence)
    while sequences[0].num_computed_tokens < until:
        finish_step(scheduler, scheduler.schedule())
    running = [sequence for sequence in sequences if sequence.state is SequenceState.RUNNING]
    assert {sequence.num_computed_tokens for sequence in running} == {until}
    return len(running)


@pytest.mark.parametrize(
    ("gigabytes", "num_tokens", "num_sequences"), [(12, 2048, 7), (12, 256, 57), (46, 2048, 27), (46, 400, 140)]
)
def test_memory_holds_so_many_sequences(gigabytes, num_tokens, num_sequences):
    num_blocks = blocks_in(gigabytes)
    assert fill(num_blocks=num_blocks, prompt=num_tokens - BLOCK_SIZE, until=num_tokens) == num_sequences


def test_memory_holds_27_sequences_when_all_their_output_is_reserved():
    assert fill(num_blocks=blocks_in(46), prompt=48, output=2000, until=50, growth_ratio=1.0) == 27


def run_overloaded(*, num_blocks, num_sequences, **growth):
    """All at once, with total lengths from 100 to 700 of at most 2,048.

    Returns, over the steps in which somebody waits, the mean of running sequences, the share of empty slots over all
    steps, and the share of sequences that were preempted.
    """
    rng = random.Random(11)
    defaults = StepLimits(max_running=200, token_budget=2048, max_long_prefills=8, long_prefill_tokens=512)
    growth = growth or {name: getattr(defaults, name) for name in ("initial_growth_ratio", "min_growth_ratio")}
    scheduler = make_scheduler(
        num_blocks=num_blocks, block_size=16, max_running=200, token_budget=2048, long_prefill_tokens=512, **growth
    )
    live, lengths = {}, {}
    for number in range(num_sequences):
        length = rng.randint(100, 700)
        prompt = rng.randint(16, length // 2)
        sequence = make_sequence(f"{number}", [number] * prompt, output=2048 - prompt, root=None)
        scheduler.add(sequence)
        live[sequence.sequence_id], lengths[sequence.sequence_id] = sequence, length
    running, waste, preempted = [], [], set()
    while live:
        plan = scheduler.schedule()
        preempted.update(plan.preempted)
        scheduler.update(plan, {planned.sequence_id: (7,) for planned in plan.sequences if planned.is_sampled})
        if scheduler.num_waiting:
            running.append(scheduler.num_running)
        num_held = sum(len(sequence.block_table) for sequence in live.values())
        waste.append(1 - scheduler.num_computed_tokens / (num_held * 16))
        for planned in plan.sequences:
            name = planned.sequence_id
            if live[name].num_tokens >= lengths[name]:
                scheduler.remove(name)
                del live[name]
    scheduler.check_integrity()
    return mean(running), mean(waste), len(preempted) / num_sequences


def test_blocks_waste_little_and_hold_four_times_the_sequences_of_a_reservation():
    num_blocks = blocks_in(12)
    paged, waste, preempted = run_overloaded(num_blocks=num_blocks, num_sequences=220)
    assert paged >= 4 * 7, "7 sequences of 2,048 tokens fit when all is reserved"
    assert waste < 0.04
    assert preempted < 0.05


def test_reserving_nothing_would_preempt_more():
    _, _, preempted = run_overloaded(
        num_blocks=blocks_in(12), num_sequences=120, initial_growth_ratio=0.0, min_growth_ratio=0.0
    )
    assert preempted > 0.05
