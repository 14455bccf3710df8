from datetime import timedelta

from gpu_worker.supervisor import HangDetector, HangLimits

LIMITS = HangLimits(minimum=timedelta(seconds=10), steps=20)


def test_an_engine_that_moves_is_never_hung():
    detector = HangDetector(LIMITS, now=0)
    assert not any(detector.observe(turns=turn, step_s=0.1, now=turn * 9.9) for turn in range(20))


def look(detector, *, until, step_s=0.1):
    """Looks every half second at an engine that does not move; when it was found hung."""
    for half_seconds in range(2 * until):
        if detector.observe(turns=5, step_s=step_s, now=1 + half_seconds / 2):
            return half_seconds / 2
    return None


def test_an_engine_without_progress_is_hung_after_the_minimum():
    assert look(HangDetector(LIMITS, now=0), until=20) == 10.5


def test_an_engine_with_long_steps_has_twenty_of_them():
    assert look(HangDetector(LIMITS, now=0), until=60, step_s=2.0) == 40.5


def test_time_in_which_nobody_looked_does_not_count():
    """Both processes were frozen together: the engine had no chance to move."""
    detector = HangDetector(LIMITS, now=0)
    assert not detector.observe(turns=5, step_s=0.1, now=1)
    assert not detector.observe(turns=5, step_s=0.1, now=1000)
    assert not detector.is_late
    assert not detector.observe(turns=6, step_s=0.1, now=1001)
