from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engine.stop_strings import StopHit, StopMatcher

patterns_of_few_letters = st.lists(st.text(alphabet="ab한", min_size=1, max_size=6), max_size=16)
pieces_of_few_letters = st.lists(st.text(alphabet="abc한", max_size=7), max_size=10)


@given(patterns=patterns_of_few_letters, pieces=pieces_of_few_letters)
def test_the_hit_is_the_longest_of_those_complete_first_however_the_text_is_cut(patterns, pieces):
    matcher = StopMatcher(patterns)
    text = ""
    for piece in pieces:
        hit = matcher.feed(piece)
        ends = [end for end in range(1, len(piece) + 1) if (text + piece[:end]).endswith(tuple(patterns))]
        if not ends:
            assert hit is None
            text += piece
            continue
        complete = [pattern for pattern in patterns if (text + piece[: ends[0]]).endswith(pattern)]
        assert hit == StopHit(pattern=max(complete, key=len), end=ends[0])
        return


@given(patterns=patterns_of_few_letters, pieces=pieces_of_few_letters)
def test_undecided_is_the_longest_beginning_of_a_pattern_at_the_end_of_the_text(patterns, pieces):
    matcher = StopMatcher(patterns)
    text = ""
    beginnings = [pattern[:length] for pattern in patterns for length in range(1, len(pattern) + 1)]
    for piece in pieces:
        if matcher.feed(piece) is not None:
            return
        text += piece
        assert matcher.num_undecided == max((len(part) for part in beginnings if text.endswith(part)), default=0)


def test_a_pattern_inside_another_is_found_at_its_own_end():
    assert StopMatcher(["abcd", "bc"]).feed("xabcd") == StopHit(pattern="bc", end=4)


def test_a_failed_beginning_falls_back_to_a_shorter_one():
    matcher = StopMatcher(["aab"])
    assert matcher.feed("aaa") is None
    assert matcher.num_undecided == 2
    assert matcher.feed("b") == StopHit(pattern="aab", end=1)


def test_many_long_patterns_with_a_common_beginning_share_their_states():
    patterns = ["a" * 255 + last for last in "bcdefghijklmnopq"]
    matcher = StopMatcher(patterns)
    assert matcher.feed("a" * 1000) is None
    assert matcher.num_undecided == 255
    assert matcher.feed("q") == StopHit(pattern=patterns[-1], end=1)
