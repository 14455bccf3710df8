"""Looking up what followed the newest tokens before."""

import random

import pytest

from gpu_worker.engine.sequence import Sequence
from gpu_worker.speculation.ngram import NgramIndex, NgramProposer
from tests.support.tiny_models import encode


def sequence_of(token_ids, name="s"):
    return Sequence(
        sequence_id=name, token_ids=list(token_ids), num_prompt_tokens=len(token_ids), max_total_tokens=1000, priority=1
    )


def propose(proposer, sequence, count):
    (rates,) = proposer.offer([(sequence, count)], count)
    return proposer.propose({sequence.sequence_id: len(rates)}).get(sequence.sequence_id, ()) if rates else ()


def test_what_followed_the_last_two_tokens_is_proposed():
    assert propose(NgramProposer(), sequence_of(encode("a cat sat. a c")), 4) == tuple(encode("at s"))


def test_without_an_earlier_place_nothing_is_proposed():
    assert propose(NgramProposer(), sequence_of(encode("abcdef")), 4) == ()
    assert propose(NgramProposer(), sequence_of(encode("a")), 4) == ()


def test_the_longest_match_counts_and_of_equal_ones_the_newest():
    assert propose(NgramProposer(), sequence_of(encode("xyab1 yab2 xyab")), 1) == tuple(encode("1"))
    assert propose(NgramProposer(), sequence_of(encode("ab1 ab2 ab")), 1) == tuple(encode("2"))


def test_a_match_that_runs_into_the_end_goes_on_with_its_own_period():
    assert propose(NgramProposer(), sequence_of(encode("abcabc")), 7) == tuple(encode("abcabca"))
    assert propose(NgramProposer(), sequence_of(encode("zaaa")), 3) == tuple(encode("aaa"))


def test_no_more_is_offered_than_the_sequence_can_take():
    sequence = sequence_of(encode("abcdabcd"))
    ((*rates,),) = NgramProposer().offer([(sequence, 2)], 5)
    assert len(rates) == 2


def test_an_index_that_grows_finds_what_a_fresh_one_finds():
    drawn = random.Random(3)
    token_ids = [drawn.randrange(3) for _ in range(30)]
    index = NgramIndex(token_ids)
    for _ in range(200):
        found, fresh = index.find(), NgramIndex(list(token_ids)).find()
        assert (found and found.length) == (fresh and fresh.length)
        if found is not None:
            length = found.length
            assert token_ids[found.place - length : found.place] == token_ids[-length:]
        token_ids += [drawn.randrange(3) for _ in range(drawn.randint(1, 4))]


def test_rates_follow_what_came_though_nothing_was_verified():
    proposer = NgramProposer()
    copying = sequence_of(encode("the quick brown fox jumps over the lazy dog. th"), "copying")
    straying = sequence_of(encode("abababab"), "straying")
    continuation = encode("e quick brown fox jumps over the lazy dog.")
    for token_id in continuation:
        proposer.offer([(copying, 4), (straying, 4)], 4)
        copying.token_ids.append(token_id)
        # Without any order.
        straying.token_ids.append(ord("a") + token_id % 2)
    good, bad = proposer.offer([(copying, 4), (straying, 4)], 4)
    assert good[0] > 0.8
    assert not bad or bad[0] < good[0]


def test_what_ended_is_forgotten():
    proposer, sequence = NgramProposer(), sequence_of(encode("abab"))
    propose(proposer, sequence, 2)
    sequence.token_ids.append(ord("a"))
    propose(proposer, sequence, 2)
    assert proposer._book._grades_by_sequence
    proposer.forget("s")
    proposer.forget("unknown")
    assert not proposer._lookups
    assert not proposer._book._grades_by_sequence


@pytest.mark.parametrize("num_tokens", [0, 1, 2])
def test_the_shortest_sequences_have_no_match(num_tokens):
    assert NgramIndex([7] * num_tokens).find() is None
