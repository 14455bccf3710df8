import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.attempts import AttemptBook, HeldAttempt
from service_kit.delta import extend_chain, join
from service_kit.ids import SessionId
from tests.support.attempts import FINISH, assignment, begin, logprob_of, ref


@pytest.fixture
def book():
    return AttemptBook(SessionId("s"))


def test_news_gather_until_a_batch_is_cut_and_the_end_follows_the_tokens(book):
    producer = begin(book, output=(9, 9))
    producer.make(1)
    producer.make(2, 3)
    producer.make(finish=FINISH)
    (news,) = book.take_news()
    assert (news.delta.first, news.delta.token_ids, news.end) == (3, (1, 2, 3), FINISH)
    assert news.delta.prev_chain == extend_chain(0, (9, 9))
    assert not book.has_news
    assert book.held() == (HeldAttempt(ref=ref(), position=5, is_finished=True),)


def test_a_large_output_is_cut_into_batches_that_continue_each_other(book):
    producer = begin(book)
    producer.make(*range(10), finish=FINISH)
    parts = []
    while book.has_news:
        (news,) = book.take_news(max_tokens=4)
        parts.append(news)
    assert [part.end for part in parts] == [None, None, FINISH]
    whole = join(part.delta for part in parts)
    assert whole.token_ids == tuple(range(10))
    assert whole.logprobs == tuple(map(logprob_of, range(10)))


@given(
    cuts=st.lists(st.integers(1, 4), max_size=6),
    resend=st.integers(0, 30),
    num_prior=st.integers(0, 3),
    is_finished=st.booleans(),
)
def test_a_resend_from_any_position_brings_exactly_the_rest(cuts, resend, num_prior, is_finished):
    book = AttemptBook(SessionId("s"))
    prior = tuple(range(num_prior))
    producer = begin(book, output=prior)
    made = [tuple(range(cut)) for cut in cuts]
    for token_ids in made:
        producer.make(*token_ids)
    if is_finished:
        producer.make(finish=FINISH)
    whole = prior + tuple(token_id for token_ids in made for token_id in token_ids)
    book.take_news()
    book.resend_from(ref(), resend)
    news = book.take_news()
    first = max(resend, num_prior + 1)
    expected = whole[first - 1 :]
    assert (news[0].delta.token_ids if news and news[0].delta else ()) == expected
    if expected:
        delta = news[0].delta
        assert delta.first == first
        assert delta.prev_chain == extend_chain(0, whole[: first - 1])
        assert delta.chain == extend_chain(0, whole)
        assert delta.logprobs == tuple(map(logprob_of, expected))
    assert (news[0].end if news else None) == (FINISH if is_finished else None)


def test_a_known_attempt_is_not_run_twice_but_sent_again_from_behind_the_assigned_output(book):
    producer = begin(book)
    producer.make(1, 2, 3)
    book.take_news()
    calls = book.assign(assignment(output=(1,)))
    assert (calls.add, calls.abort) == (None, None)
    (news,) = book.take_news()
    assert (news.delta.first, news.delta.token_ids) == (2, (2, 3))


def test_a_higher_attempt_replaces_a_lower_one_silently(book):
    old = begin(book, 1)
    old.make(1)
    calls = book.assign(assignment(2, output=(1,)))
    assert calls.abort == old.sequence_id
    assert calls.add.output_token_ids == (1,)
    assert old.make(2) is None
    assert not book.has_news
    assert [held.ref for held in book.held()] == [ref(2)]


def test_a_superseded_assignment_is_ignored(book):
    begin(book, 2)
    calls = book.assign(assignment(1))
    assert (calls.add, calls.abort) == (None, None)
    assert [held.ref for held in book.held()] == [ref(2)]


def test_a_finished_lower_attempt_needs_no_abort(book):
    begin(book, 1).make(finish=FINISH)
    assert book.assign(assignment(2)).abort is None


def test_cancel_reaches_only_what_runs(book):
    producer = begin(book)
    assert book.cancel(ref(2)).abort is None
    assert book.cancel(ref(1, "other")).abort is None
    assert book.cancel(ref()).abort == producer.sequence_id
    producer.make(finish=FINISH)
    assert book.cancel(ref()).abort is None


def test_a_new_stream_sends_nothing_of_an_attempt_until_its_verdict(book):
    producer = begin(book)
    producer.make(1, 2)
    book.take_news()
    book.begin_stream()
    producer.make(3)
    assert not book.has_news
    book.keep(ref())
    assert [news.delta.token_ids for news in book.take_news()] == [(3,)]
    book.begin_stream()
    book.resend_from(ref(), 2)
    assert [news.delta.token_ids for news in book.take_news()] == [(2, 3)]


def test_an_end_is_held_and_sent_again_until_it_is_acknowledged(book):
    producer = begin(book)
    producer.make(1, finish=FINISH)
    book.take_news()
    book.begin_stream()
    book.keep(ref())
    (news,) = book.take_news()
    assert (news.delta, news.end) == (None, FINISH)
    book.forget(ref())
    assert book.held() == ()


def test_forgetting_a_running_attempt_stops_it(book):
    producer = begin(book)
    producer.make(1)
    assert book.forget(ref()).abort == producer.sequence_id
    assert not book.has_news
    assert len(book) == 0


def test_a_failed_assignment_has_an_end_and_runs_nothing(book):
    book.fail(ref(), "bad", num_prior=4)
    (news,) = book.take_news()
    assert (news.end.failure, news.end.output_tokens, news.delta) == ("bad", 4, None)
