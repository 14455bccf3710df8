import pytest

from scheduler.policy import LostAttempt, charged_of
from state_store.ports import AttemptRef


def ref(name):
    return AttemptRef(generation_id=name, attempt=1)


def lost(*, young="", old="", young_charged="", old_charged=""):
    """One attempt per letter; the old ones have added tokens, the charged ones were charged before."""
    return [
        LostAttempt(ref=ref(name), added_tokens=added_tokens, was_charged=was_charged)
        for names, added_tokens, was_charged in [
            (young, 0, False),
            (old, 7, False),
            (young_charged, 0, True),
            (old_charged, 7, True),
        ]
        for name in names
    ]


@pytest.mark.parametrize(
    ("attempts", "untried", "charged"),
    [
        (lost(young="ab", old="c"), "a", "a"),
        (lost(young="ab", old="c"), "", ""),
        (lost(young="ab", old="c"), None, "ab"),
        (lost(young="ab", old="c"), "ac", "a"),
        (lost(young="ab", young_charged="p"), "abp", "p"),
        (lost(young="ab", young_charged="p"), None, "p"),
        (lost(young="ab", young_charged="p"), "ab", "ab"),
        (lost(young="ab", old_charged="q"), "abq", "ab"),
        (lost(old="ab", old_charged="q"), None, ""),
    ],
    ids=[
        "what the fatal step ran first",
        "a step that ran nothing first",
        "unknown: whatever added nothing",
        "what added a token did not do it",
        "a charged one among the suspects did it",
        "and also where the step is unknown",
        "a charged one that was not in the step did not",
        "nor one that has added a token since",
        "nobody is left to suspect",
    ],
)
def test_a_crash_charges(attempts, untried, charged):
    named = None if untried is None else set(map(ref, untried))
    assert charged_of(attempts, named) == set(map(ref, charged))
