from datetime import timedelta

from gpu_worker.supervisor import HangDetector, HangLimits

LIMITS = HangLimits(minimum=timedelta(seconds=10), steps=20)


def test_an_engine_that_moves_is_never_hung():
    detector = HangDetector(LIMITS, now=0)
    assert not any(detector.observe(turns=turn, step_s=0.1, now=turn * 9.9) for turn in range(20))


def test_an_engine_without_progress_is_hung_after_the_minimum():
    detector = HangDetector(LIMITS, now=0)
    assert not detector.observe(turns=5, step_s=0.1, now=1)
    assert not detector.observe(turns=5, step_s=0.1, now=11)
    assert detector.observe(turns=5, step_s=0.1, now=11.1)


def test_an_engine_with_long_steps_has_twenty_of_them():
    detector = HangDetector(LIMITS, now=0)
    assert not detector.observe(turns=5, step_s=2.0, now=1)
    assert not detector.observe(turns=5, step_s=2.0, now=41)
    assert detector.observe(turns=5, step_s=2.0, now=41.1)
