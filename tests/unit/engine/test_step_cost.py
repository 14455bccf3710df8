from dataclasses import replace

import pytest

from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.engine.sequence import PlannedSequence, StepPlan
from gpu_worker.engine.settings import EngineSettings
from gpu_worker.engine.step_cost import StepCost, attended_positions
from gpu_worker.engine.step_scheduler import StepScheduler
from tests.support.step_runs import BATCH, INTERACTIVE, finish_step, make_scheduler, make_sequence, run_step


def cost_of(plan, *, c0=0.010, c1=0.001, c2=0.000_01):
    attended = sum(
        position + 1 for planned in plan.sequences for position in range(planned.start, planned.context_length)
    )
    return c0 + c1 * plan.num_tokens + c2 * attended


def run_timed(scheduler, **coefficients):
    """One step on a machine of known cost; returns the plan and its seconds."""
    plan = scheduler.schedule()
    seconds = cost_of(plan, **coefficients)
    scheduler.observe(plan, seconds)
    finish_step(scheduler, plan)
    return plan, seconds


def test_a_row_attends_to_itself_and_to_everything_before_it():
    assert attended_positions(0, 3) == 1 + 2 + 3
    assert attended_positions(10, 2) == 11 + 12


def test_the_coefficients_are_found_from_mixed_steps():
    cost = StepCost()
    for step in range(60):
        tokens, attended = 1 + step * 7 % 50, 100 + step * 131 % 1000
        cost.observe(tokens=tokens, attended=attended, seconds=0.02 + 0.003 * tokens + 0.000_04 * attended)
    assert cost.predict(tokens=200, attended=5000) == pytest.approx(0.02 + 0.6 + 0.2, rel=0.02)


def test_no_coefficient_is_negative():
    cost = StepCost()
    for tokens in range(1, 40):  # falling with tokens: only a constant can explain it
        cost.observe(tokens=tokens, attended=tokens, seconds=1 / tokens)
    assert cost.predict(tokens=10_000, attended=0) == pytest.approx(cost.predict(tokens=1, attended=0))
    assert cost.predict(tokens=0, attended=0) > 0


def test_old_steps_are_forgotten():
    cost = StepCost(forgetting=0.9)
    for seconds in (1.0, 0.1):
        for step in range(100):
            cost.observe(tokens=1 + step % 3, attended=10 + step % 7, seconds=seconds)
    assert cost.predict(tokens=2, attended=13) == pytest.approx(0.1, rel=0.05)


def test_what_equal_steps_do_not_say_stays_as_it_was():
    cost = StepCost()
    for step in range(60):
        tokens = 1 + step % 40
        cost.observe(tokens=tokens, attended=50 + step * 37 % 100, seconds=0.05 + 0.002 * tokens)
    for _ in range(500):
        cost.observe(tokens=8, attended=800, seconds=0.05 + 0.002 * 8)
        cost.predict(tokens=8, attended=800)
    assert cost.predict(tokens=108, attended=900) == pytest.approx(0.266, rel=0.1)


def test_nothing_is_predicted_before_the_first_step():
    assert StepCost().predict(tokens=1, attended=1) is None


@pytest.mark.parametrize("seconds", [-0.1, float("nan"), float("inf")])
def test_impossible_seconds_are_refused(seconds):
    with pytest.raises(ValueError, match="seconds"):
        StepCost().observe(tokens=1, attended=1, seconds=seconds)


def test_prefill_is_cut_so_that_steps_stay_within_the_target():
    scheduler = make_scheduler(num_blocks=1000, token_budget=512, long_prefill_tokens=512, target_step_s=0.1)
    scheduler.add(make_sequence("a", range(2000)))
    steps = [run_timed(scheduler) for _ in range(20)]
    assert steps[0][0].num_tokens == 16, "before anything is known, the least"
    assert max(seconds for _, seconds in steps) <= 0.105
    assert sum(seconds for _, seconds in steps[4:]) / 16 > 0.09, "and the target is used"


def run_beside_a_long_prompt(limits):
    """8 streams decode, then a prompt of 6,000 tokens comes. The longest step, and the seconds until the prompt is computed.

    The costs are those of SmolLM2-135M on two cores: 20 ms, 1.8 ms a token, and 0.2 us an attended position.
    """
    costs = {"c0": 0.02, "c1": 0.0018, "c2": 2e-7}
    scheduler = StepScheduler(pool=BlockPool(num_blocks=2000, block_size=16), limits=limits)
    warm_up = PlannedSequence(sequence_id="w", start=0, token_ids=(0,) * 16, block_table=(0,), is_sampled=True)
    known = StepPlan(sequences=(warm_up,))
    scheduler.observe(known, cost_of(known, **costs))
    for number in range(8):
        scheduler.add(make_sequence(f"{number}", range(number, 100 + number), output=2000))
    for _ in range(10):
        run_timed(scheduler, **costs)
    long = make_sequence("long", range(6000))
    scheduler.add(long)
    taken = []
    while not long.is_decoding:
        plan, seconds = run_timed(scheduler, **costs)
        assert {f"{number}" for number in range(8)} <= {planned.sequence_id for planned in plan.sequences}
        taken.append(seconds)
    return max(taken), sum(taken)


def test_by_default_streams_beside_a_long_prompt_go_on_twice_a_second():
    limits = EngineSettings().step_limits()
    longest, seconds = run_beside_a_long_prompt(limits)
    longest_without, seconds_without = run_beside_a_long_prompt(replace(limits, target_step_s=None))
    assert longest <= 0.55
    assert longest_without > 0.9
    assert seconds < 1.25 * seconds_without, "and the prompt pays little for it"


def test_by_default_a_full_batch_of_a_small_model_decodes_together():
    scheduler = StepScheduler(pool=BlockPool(num_blocks=2000, block_size=16), limits=EngineSettings().step_limits())
    for number in range(64):
        scheduler.add(make_sequence(f"{number}", range(number, number + 60), output=200))
    for _ in range(60):
        run_timed(scheduler, c0=0.02, c1=0.0024, c2=4e-7)
    assert scheduler.num_running == 64


def test_prefill_always_progresses_by_the_least_chunk():
    scheduler = make_scheduler(num_blocks=1000, target_step_s=0.001, min_prefill_tokens=5)
    scheduler.add(make_sequence("a", range(40)))
    assert [run_timed(scheduler)[0].num_tokens for _ in range(9)] == [5] * 8 + [1]


def test_only_one_least_chunk_is_taken_beyond_the_target():
    scheduler = make_scheduler(num_blocks=1000, target_step_s=0.001, min_prefill_tokens=5)
    for name in "ab":
        scheduler.add(make_sequence(name, range(40), root=None))
    plans = [run_timed(scheduler)[0] for _ in range(8)]
    assert [[planned.sequence_id for planned in plan.sequences] for plan in plans] == [["a"]] * 8


def run_at_target(num_steps=60):
    """Short sequences keep coming; a decode step costs 10 ms and 5 ms for each, 50 ms are wanted: 8 fit."""
    scheduler = make_scheduler(num_blocks=1000, max_running=40, target_step_s=0.05)
    steps = []
    for number in range(num_steps):
        scheduler.add(make_sequence(f"{number}", [number], output=500))
        steps.append(run_timed(scheduler, c1=0.005, c2=0))
    return scheduler, steps


def test_sequences_are_taken_in_while_the_enlarged_batch_decodes_within_the_target():
    scheduler, steps = run_at_target()
    assert 7 <= scheduler.num_running <= 8
    assert max(seconds for _, seconds in steps) <= 0.0501


def test_a_higher_class_takes_a_place_in_a_batch_that_is_full_for_the_target():
    scheduler = make_scheduler(num_blocks=1000, max_running=40, target_step_s=0.05)
    for number in range(60):
        scheduler.add(make_sequence(f"{number}", [number], output=500, priority=BATCH))
        run_timed(scheduler, c1=0.005, c2=0)
    num_running = scheduler.num_running
    scheduler.add(make_sequence("urgent", [1], priority=INTERACTIVE))
    plan, _ = run_timed(scheduler, c1=0.005, c2=0)
    assert len(plan.preempted) == 1
    assert "urgent" in {planned.sequence_id for planned in plan.sequences}
    assert scheduler.num_running == num_running


def test_one_sequence_always_runs():
    scheduler = make_scheduler(target_step_s=0.001)
    for name in "ab":
        scheduler.add(make_sequence(name, [1, 2], output=6))
    for _ in range(5):
        plan, _ = run_timed(scheduler)
        assert [planned.sequence_id for planned in plan.sequences] == ["a"]
    scheduler.remove("a")
    assert run_step(scheduler) == {"b": 2}


def test_without_a_target_observations_change_nothing():
    plans = []
    for seconds in (0.0, 2.0):
        scheduler = make_scheduler(max_running=3)
        for number in range(6):
            scheduler.add(make_sequence(f"{number}", range(50)))
        plans.append([])
        for _ in range(12):
            plan = scheduler.schedule()
            scheduler.observe(plan, seconds)
            finish_step(scheduler, plan)
            plans[-1].append(plan)
    assert plans[0] == plans[1]
