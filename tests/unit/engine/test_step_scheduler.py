import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.engine.admission import GrowthRatio
from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.engine.sequence import Sequence, SequenceState
from gpu_worker.engine.step_cost import StepCost
from gpu_worker.engine.step_draft import StepDraft
from gpu_worker.engine.step_scheduler import NeverFitsError, StepLimits, StepScheduler

INTERACTIVE, STANDARD, BATCH = 0, 1, 2


def make_scheduler(*, num_blocks=100, max_running=8, token_budget=64, max_long_prefills=1, long_prefill_tokens=32):
    limits = StepLimits(
        max_running=max_running,
        token_budget=token_budget,
        max_long_prefills=max_long_prefills,
        long_prefill_tokens=long_prefill_tokens,
        initial_growth_ratio=0.0,
        min_growth_ratio=0.0,
    )
    return StepScheduler(pool=BlockPool(num_blocks=num_blocks, block_size=4), limits=limits)


def make_sequence(name, *, prompt=4, output=100, priority=STANDARD):
    return Sequence(
        sequence_id=name,
        token_ids=list(range(prompt)),
        num_prompt_tokens=prompt,
        max_total_tokens=prompt + output,
        priority=priority,
    )


def run_step(scheduler):
    """Plans and 'computes' one step; returns tokens per sequence."""
    plan = scheduler.schedule()
    scheduler.check_integrity()
    scheduler.update(plan, {planned.sequence_id: (7,) for planned in plan.sequences if planned.is_sampled})
    scheduler.check_integrity()
    return {planned.sequence_id: len(planned.token_ids) for planned in plan.sequences}


def run_until_preempted(scheduler):
    while True:
        plan = scheduler.schedule()
        scheduler.update(plan, {planned.sequence_id: (7,) for planned in plan.sequences if planned.is_sampled})
        if plan.preempted:
            return plan


def test_a_prompt_is_computed_in_chunks_and_then_one_token_per_step():
    scheduler = make_scheduler(token_budget=10, max_running=4)
    scheduler.add(make_sequence("a", prompt=23))
    assert [run_step(scheduler) for _ in range(5)] == [{"a": 10}, {"a": 10}, {"a": 3}, {"a": 1}, {"a": 1}]


def test_only_the_chunk_that_reaches_the_end_is_sampled():
    scheduler = make_scheduler(token_budget=10, max_running=4)
    scheduler.add(make_sequence("a", prompt=15))
    plan = scheduler.schedule()
    assert [planned.is_sampled for planned in plan.sequences] == [False]
    scheduler.update(plan, {})
    plan = scheduler.schedule()
    assert [(planned.start, planned.token_ids, planned.is_sampled) for planned in plan.sequences] == [
        (10, (10, 11, 12, 13, 14), True)
    ]


def test_decodes_come_before_prefill_chunks():
    scheduler = make_scheduler(token_budget=10, max_running=4)
    scheduler.add(make_sequence("decoding", prompt=2))
    run_step(scheduler)
    scheduler.add(make_sequence("new", prompt=30, priority=INTERACTIVE))
    assert run_step(scheduler) == {"decoding": 1, "new": 9}


def test_higher_classes_prefill_first_and_then_earlier_arrivals():
    scheduler = make_scheduler(token_budget=12, max_running=4)
    scheduler.add(make_sequence("batch", prompt=8, priority=BATCH))
    scheduler.add(make_sequence("first", prompt=8))
    scheduler.add(make_sequence("second", prompt=8))
    scheduler.add(make_sequence("interactive", prompt=8, priority=INTERACTIVE))
    assert run_step(scheduler) == {"interactive": 8, "first": 4}


def test_no_more_than_max_running_sequences_hold_blocks():
    scheduler = make_scheduler(max_running=2)
    for name in "abc":
        scheduler.add(make_sequence(name))
    assert run_step(scheduler).keys() == {"a", "b"}
    scheduler.remove("a")
    assert run_step(scheduler).keys() == {"b", "c"}


def test_a_long_prefill_leaves_room_for_short_ones_behind_it():
    scheduler = make_scheduler(token_budget=64, long_prefill_tokens=32)
    scheduler.add(make_sequence("long", prompt=200))
    scheduler.add(make_sequence("short", prompt=20))
    assert run_step(scheduler) == {"long": 32 + 12, "short": 20}


def test_a_second_long_prefill_waits_and_short_ones_pass_it():
    scheduler = make_scheduler(token_budget=64, max_long_prefills=1, long_prefill_tokens=32)
    scheduler.add(make_sequence("long", prompt=149))
    scheduler.add(make_sequence("long too", prompt=150))
    scheduler.add(make_sequence("short", prompt=10))
    assert run_step(scheduler) == {"long": 54, "short": 10}
    assert run_step(scheduler) == {"short": 1, "long": 63}
    assert run_step(scheduler).keys() == {"short", "long", "long too"}, "32 tokens or fewer are no long prefill"


def test_a_step_looks_past_a_bounded_number_of_long_prefills():
    scheduler = make_scheduler(num_blocks=1000, token_budget=64, max_long_prefills=1, long_prefill_tokens=32)
    for number in range(66):
        scheduler.add(make_sequence(f"long {number}", prompt=100))
    scheduler.add(make_sequence("short", prompt=10))
    assert run_step(scheduler).keys() == {"long 0"}
    scheduler.remove("long 1")
    scheduler.remove("long 2")
    assert run_step(scheduler).keys() == {"long 0", "short"}


def test_long_prefills_of_a_lower_class_do_not_keep_out_those_of_a_higher_one():
    scheduler = make_scheduler(num_blocks=1000, token_budget=64, max_long_prefills=1, long_prefill_tokens=32)
    scheduler.add(make_sequence("batch", prompt=900, priority=BATCH))
    run_step(scheduler)
    scheduler.add(make_sequence("standard", prompt=150, priority=STANDARD))
    scheduler.add(make_sequence("standard too", prompt=150, priority=STANDARD))
    assert run_step(scheduler) == {"standard": 32, "batch": 32}
    scheduler.add(make_sequence("interactive", prompt=100, priority=INTERACTIVE))
    assert run_step(scheduler) == {"interactive": 32, "standard": 32}


def test_the_latest_arrival_of_the_lowest_class_is_preempted():
    scheduler = make_scheduler(num_blocks=7)
    for name, priority in (("batch 1", BATCH), ("batch 2", BATCH), ("standard", STANDARD)):
        scheduler.add(make_sequence(name, prompt=7, output=20, priority=priority))
    assert run_step(scheduler).keys() == {"batch 1", "batch 2", "standard"}
    assert run_until_preempted(scheduler).preempted == ("batch 2",)


def test_a_preempted_sequence_keeps_its_place_and_its_tokens():
    scheduler = make_scheduler(num_blocks=8)
    first, second = make_sequence("first", prompt=10, output=20), make_sequence("second", prompt=10, output=20)
    scheduler.add(first)
    scheduler.add(second)
    assert run_until_preempted(scheduler).preempted == ("second",)
    assert second.state is SequenceState.PREEMPTED
    num_tokens = second.num_tokens
    assert num_tokens > 10
    scheduler.add(make_sequence("third", prompt=4, output=4))
    assert run_step(scheduler).keys() == {"first"}, "third must not overtake second"
    scheduler.remove("first")
    assert run_step(scheduler) == {"second": num_tokens, "third": 4}
    assert scheduler.num_preempted == 1


def test_a_higher_class_takes_blocks_of_lower_ones_to_come_in():
    scheduler = make_scheduler(num_blocks=6)
    scheduler.add(make_sequence("batch", prompt=16, output=8, priority=BATCH))
    run_step(scheduler)
    scheduler.add(make_sequence("standard", prompt=16, output=8))
    plan = scheduler.schedule()
    assert plan.preempted == ("batch",)
    assert [planned.sequence_id for planned in plan.sequences] == ["standard"]


def test_a_higher_class_takes_a_place_in_a_full_batch():
    scheduler = make_scheduler(max_running=2)
    scheduler.add(make_sequence("batch 1", priority=BATCH))
    scheduler.add(make_sequence("batch 2", priority=BATCH))
    run_step(scheduler)
    scheduler.add(make_sequence("interactive", priority=INTERACTIVE))
    assert run_step(scheduler).keys() == {"batch 1", "interactive"}


def test_an_equal_class_never_takes_blocks_to_come_in():
    scheduler = make_scheduler(num_blocks=6)
    scheduler.add(make_sequence("first", prompt=16, output=8))
    run_step(scheduler)
    scheduler.add(make_sequence("second", prompt=16, output=8))
    assert run_step(scheduler).keys() == {"first"}


def test_what_could_not_run_alone_is_refused():
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_sequence("fits", prompt=10, output=7))  # 16 tokens in KV memory, the last is only sampled
    with pytest.raises(NeverFitsError, match="needs 5 KV blocks, the engine has 4"):
        scheduler.add(make_sequence("does not", prompt=10, output=8))


def test_a_removed_sequence_gives_its_blocks_back_in_any_state():
    scheduler = make_scheduler(max_running=1)
    scheduler.add(make_sequence("running", prompt=9))
    scheduler.add(make_sequence("waiting"))
    run_step(scheduler)
    scheduler.remove("running")
    scheduler.remove("waiting")
    scheduler.check_integrity()
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)


def test_a_budget_below_the_batch_size_is_refused():
    with pytest.raises(ValueError, match="token_budget"):
        StepLimits(max_running=8, token_budget=7, max_long_prefills=1, long_prefill_tokens=4)


_specs = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30), st.integers(0, 2)), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(specs=_specs, num_blocks=st.integers(23, 40), token_budget=st.integers(4, 50), data=st.data())
def test_every_sequence_ends_in_any_mix_of_sizes_and_classes(specs, num_blocks, token_budget, data):
    """Progress: whatever arrives and whenever, all sequences end, within budget, and no block leaks."""
    scheduler = make_scheduler(num_blocks=num_blocks, max_running=4, token_budget=token_budget, long_prefill_tokens=16)
    pending = [
        make_sequence(f"{number}", prompt=prompt, output=output, priority=priority)
        for number, (prompt, output, priority) in enumerate(specs)
    ]
    live = {}
    for _ in range(5000):
        while pending and (not live or data.draw(st.booleans())):
            sequence = pending.pop()
            scheduler.add(sequence)
            live[sequence.sequence_id] = sequence
        if not live:
            break
        assert 1 <= sum(run_step(scheduler).values()) <= token_budget
        for name, sequence in list(live.items()):
            if sequence.num_tokens == sequence.max_total_tokens:
                scheduler.remove(name)
                del live[name]
    assert not live
    scheduler.check_integrity()


def make_growing_scheduler(**growth):
    limits = StepLimits(max_running=8, token_budget=64, max_long_prefills=8, long_prefill_tokens=64, **growth)
    return StepScheduler(pool=BlockPool(num_blocks=30, block_size=4), limits=limits)


def test_expected_growth_of_running_sequences_is_kept_free():
    scheduler = make_growing_scheduler(initial_growth_ratio=0.5, min_growth_ratio=0.5)
    for name in "ab":
        scheduler.add(make_sequence(name, prompt=20, output=81))  # 20 now and 40 more: 15 of 30 blocks
    assert run_step(scheduler).keys() == {"a"}, "one block is kept free besides"
    scheduler.remove("b")
    scheduler.add(make_sequence("c", prompt=12, output=81))
    assert run_step(scheduler).keys() == {"a", "c"}


def test_no_growth_is_kept_free_for_lower_classes():
    scheduler = make_growing_scheduler(initial_growth_ratio=1.0, min_growth_ratio=1.0)
    scheduler.add(make_sequence("batch", prompt=20, output=80, priority=BATCH))
    run_step(scheduler)
    scheduler.add(make_sequence("equal", prompt=20, output=40, priority=BATCH))
    scheduler.add(make_sequence("higher", prompt=20, output=40))
    assert run_step(scheduler).keys() == {"batch", "higher"}


def test_a_sequence_alone_needs_no_room_for_growth():
    scheduler = make_growing_scheduler(initial_growth_ratio=1.0, min_growth_ratio=1.0)
    scheduler.add(make_sequence("a", prompt=60, output=61))
    assert run_step(scheduler) == {"a": 60}


def test_the_expected_share_rises_when_memory_ran_out_and_sinks_to_its_least_otherwise():
    growth = GrowthRatio(initial=0.5, minimum=0.1)
    growth.step(is_short_of_blocks=True)
    assert growth.value == pytest.approx(0.6)
    sunk = []
    for _ in range(1000):
        growth.step(is_short_of_blocks=False)
        sunk.append(growth.value)
    assert sunk == sorted(sunk, reverse=True)
    assert sunk[-1] == 0.1
    for _ in range(20):
        growth.step(is_short_of_blocks=True)
    assert growth.value == 1.0


def test_a_preempted_sequence_leaves_no_trace_in_the_draft():
    limits = StepLimits(max_running=8, token_budget=64, max_long_prefills=8, long_prefill_tokens=64, target_step_s=1.0)
    cost = StepCost()
    for step in range(50):  # 10 ms for each position attended to, and nothing else
        cost.observe(tokens=1 + step % 3, attended=step % 7, seconds=0.01 * (step % 7))
    draft, sequence = StepDraft(limits=limits, cost=cost), make_sequence("a", prompt=60)
    draft.extend_prefill(make_sequence("b"), 1)
    room = draft.room_for_prefill(30, 20)
    assert 0 < room < 20
    draft.extend_prefill(sequence, 10)
    draft.preempt(sequence)
    assert draft.room_for_prefill(30, 20) == room
