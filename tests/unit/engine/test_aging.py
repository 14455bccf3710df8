"""Lower classes under higher ones that never run dry: each sequence ends, and one at a time is raised for it."""

import pytest

from gpu_worker.engine import aging
from gpu_worker.engine.sequence import SequenceState
from tests.support.step_runs import BATCH, INTERACTIVE, STANDARD, make_scheduler, make_sequence

STEP_S = 0.5


class Saturated:
    """A batch of two that INTERACTIVE work always fills; every sequence has 4 tokens of output."""

    def __init__(self, **limits):
        self.scheduler = make_scheduler(max_running=2, **limits)
        self.num_added = 0
        self.sequences = {}
        self.ended = []

    def add(self, name, priority):
        self.sequences[name] = make_sequence(name, range(8), output=4, priority=priority)
        self.scheduler.add(self.sequences[name])

    def live(self, priority):
        return [name for name in self.sequences if name.startswith(f"class-{priority}")]

    def run_step(self):
        while len(self.live(INTERACTIVE)) < 4:
            self.add(f"class-{INTERACTIVE}-{self.num_added}", INTERACTIVE)
            self.num_added += 1
        plan = self.scheduler.schedule()
        self.scheduler.update(plan, {each.sequence_id: (7,) for each in plan.sequences if each.is_sampled})
        self.scheduler.observe(plan, STEP_S)
        self.scheduler.check_integrity()
        for name, sequence in list(self.sequences.items()):
            if len(sequence.token_ids) >= sequence.max_total_tokens:
                self.scheduler.remove(name)
                del self.sequences[name]
                self.ended.append(name)

    def raised(self):
        return [name for name, each in self.sequences.items() if "class-0" not in name and each.priority == INTERACTIVE]


def test_every_batch_sequence_ends_under_interactive_work_that_never_runs_dry():
    run = Saturated()
    for number in range(5):
        run.add(f"class-{BATCH}-{number}", BATCH)
    for _ in range(int(aging.PATIENCE_S / STEP_S) - 2):
        run.run_step()
        assert run.raised() == []
    assert not any(name.startswith(f"class-{BATCH}") for name in run.ended)
    for _ in range(60):
        run.run_step()
        assert len(run.raised()) <= 1
    batch = [name for name in run.ended if name.startswith(f"class-{BATCH}")]
    assert batch == [f"class-{BATCH}-{number}" for number in range(5)]
    assert run.num_added > 40


def test_what_loses_its_blocks_again_and_again_waits_in_all_and_then_keeps_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(aging, "PATIENCE_S", 5.0)
    run = Saturated()
    sequence = make_sequence("class-1-long", range(8), output=60, priority=STANDARD)
    run.sequences["class-1-long"] = sequence
    run.scheduler.add(sequence)
    plan = run.scheduler.schedule()
    run.scheduler.update(plan, {"class-1-long": (7,)})
    run.run_step()
    assert sequence.state is SequenceState.PREEMPTED
    while sequence.priority != INTERACTIVE:
        run.run_step()
    for _ in range(8):
        run.run_step()
    assert sequence.state is SequenceState.RUNNING
    num_preempted = run.scheduler.num_preempted
    while "class-1-long" in run.sequences:
        run.run_step()
    assert run.scheduler.num_preempted == num_preempted


def test_time_that_nobody_waits_in_makes_nothing_urgent():
    run = Saturated()
    run.add("class-2-alone", BATCH)
    plan = run.scheduler.schedule()
    run.scheduler.observe(plan, 10 * aging.PATIENCE_S)
    assert run.sequences["class-2-alone"].priority == BATCH
