import pytest
from hypothesis import given
from hypothesis import strategies as st

from service_kit.delta import (
    EMPTY_CHAIN,
    ChainMismatchError,
    Cursor,
    Delta,
    TokenLogprob,
    extend_chain,
    join,
    make_delta,
    rest_after,
)

token_ids = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=30)


@given(token_ids, st.data())
def test_the_chain_depends_on_the_ids_and_not_on_how_they_were_cut(ids: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(ids)))
    assert extend_chain(extend_chain(EMPTY_CHAIN, ids[:cut]), ids[cut:]) == extend_chain(EMPTY_CHAIN, ids)


@given(token_ids, token_ids)
def test_different_outputs_have_different_chains(left: list[int], right: list[int]) -> None:
    assert (extend_chain(EMPTY_CHAIN, left) == extend_chain(EMPTY_CHAIN, right)) == (left == right)


@given(token_ids, st.data())
def test_the_rest_after_any_cursor_is_what_follows_it(ids: list[int], data: st.DataObject) -> None:
    delta = make_delta(after=Cursor(), token_ids=ids, texts=[f"<{token_id}>" for token_id in ids])
    known = data.draw(st.integers(0, len(ids)))
    cursor = Cursor(sequence_number=known, chain=extend_chain(EMPTY_CHAIN, ids[:known]))
    rest = rest_after(cursor, delta)
    if known == len(ids):
        assert rest is None
    else:
        assert rest is not None
        assert (rest.first, rest.token_ids, rest.prev_chain, rest.chain) == (
            known + 1,
            tuple(ids[known:]),
            cursor.chain,
            delta.chain,
        )
        assert rest.text == "".join(f"<{token_id}>" for token_id in ids[known:])


@pytest.mark.parametrize("known", [0, 1, 3])
def test_a_cursor_with_another_chain_is_refused_at_every_position(known: int) -> None:
    delta = make_delta(after=Cursor(), token_ids=[5, 6, 7], texts=["a", "b", "c"])
    with pytest.raises(ChainMismatchError):
        rest_after(Cursor(sequence_number=known, chain=99), delta)


def test_a_delta_behind_a_gap_is_the_callers_mistake() -> None:
    delta = make_delta(after=Cursor(sequence_number=4, chain=1), token_ids=[5], texts=["a"])
    with pytest.raises(ValueError, match="gap"):
        rest_after(Cursor(sequence_number=3, chain=1), delta)


def test_a_delta_wholly_before_the_cursor_adds_nothing() -> None:
    delta = make_delta(after=Cursor(), token_ids=[5, 6], texts=["a", "b"])
    assert rest_after(Cursor(sequence_number=9, chain=1), delta) is None


def test_joining_gives_back_what_was_cut() -> None:
    whole = make_delta(after=Cursor(), token_ids=[1, 2, 3], texts=["a", "b", "c"])
    left = make_delta(after=Cursor(), token_ids=[1], texts=["a"])
    right = rest_after(left.end, whole)
    assert right is not None
    assert join([left, right]) == whole
    assert join([]) is None


def test_log_probabilities_are_cut_and_joined_with_their_tokens() -> None:
    logprobs = [TokenLogprob(-1.0), TokenLogprob(-2.0, ((7, -0.5),)), TokenLogprob(-3.0)]
    whole = make_delta(after=Cursor(), token_ids=[1, 2, 3], texts=["a", "b", "c"], logprobs=logprobs)
    left = make_delta(after=Cursor(), token_ids=[1], texts=["a"], logprobs=logprobs[:1])
    right = rest_after(left.end, whole)
    assert right is not None
    assert right.logprobs == tuple(logprobs[1:])
    assert join([left, right]) == whole


def test_a_part_without_log_probabilities_leaves_the_whole_without() -> None:
    left = make_delta(after=Cursor(), token_ids=[1], texts=["a"], logprobs=[TokenLogprob(-1.0)])
    right = make_delta(after=left.end, token_ids=[2], texts=["b"])
    assert join([left, right]) == make_delta(after=Cursor(), token_ids=[1, 2], texts=["a", "b"])


def test_a_delta_has_log_probabilities_for_all_tokens_or_none() -> None:
    with pytest.raises(ValueError, match="log probabilities"):
        make_delta(after=Cursor(), token_ids=[1, 2], texts=["a", "b"], logprobs=[TokenLogprob(-1.0)])


def test_joining_refuses_a_gap_and_another_chain() -> None:
    left = make_delta(after=Cursor(), token_ids=[1], texts=["a"])
    gap = make_delta(after=Cursor(sequence_number=2, chain=left.chain), token_ids=[2], texts=["b"])
    other = make_delta(after=Cursor(sequence_number=1, chain=7), token_ids=[2], texts=["b"])
    for right in (gap, other):
        with pytest.raises(ValueError, match="does not continue"):
            join([left, right])


@pytest.mark.parametrize(("first", "ids", "texts"), [(0, (1,), ("a",)), (1, (), ()), (1, (1, 2), ("a",))])
def test_a_delta_without_number_tokens_or_texts_cannot_be_made(
    first: int, ids: tuple[int, ...], texts: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match="delta"):
        Delta(first=first, token_ids=ids, texts=texts, prev_chain=0, chain=0)
