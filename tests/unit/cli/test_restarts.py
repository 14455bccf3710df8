from sluice.local.restarts import RestartClock


def test_a_child_that_keeps_dying_is_started_ever_later_up_to_a_bound() -> None:
    clock = RestartClock()
    clock.started(100.0)
    delays = []
    for _ in range(12):
        delays.append(clock.died(100.0))
        clock.started(100.0)
    assert delays[:4] == [0.25, 0.5, 1.0, 2.0]
    assert delays[-1] == 10.0


def test_a_child_that_lived_for_a_while_is_started_at_once_again() -> None:
    clock = RestartClock(deaths=9)
    clock.started(100.0)
    assert clock.died(130.0) == 0.25


def test_a_restart_is_due_after_its_delay_and_only_after_a_death() -> None:
    clock = RestartClock()
    clock.started(100.0)
    assert not clock.is_due(1_000.0)
    clock.died(100.0)
    assert not clock.is_due(100.2)
    assert clock.is_due(100.25)
    clock.started(100.3)
    assert not clock.is_due(1_000.0)
