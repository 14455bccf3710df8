from dataclasses import replace
from types import SimpleNamespace

import pytest

from scheduler.attempt_table import AttemptTable, ExpectedAttempt, HeldAttempt
from state_store.model import PriorityClass
from state_store.ports import AttemptRef


def ref(name):
    return AttemptRef(generation_id=name, attempt=1)


def held(name, *, is_finished=False):
    return HeldAttempt(ref=ref(name), position=0, is_finished=is_finished)


@pytest.fixture
def table():
    """Attempts "a", "b", "c" of the three classes, with contexts of 1, 10 and 100 tokens."""
    table = AttemptTable()
    for index, (name, priority_class) in enumerate(zip("abc", PriorityClass, strict=True)):
        record = SimpleNamespace(generation_id=name, attempt=1, priority_class=priority_class)
        span = SimpleNamespace(end=lambda: None)
        attempt = ExpectedAttempt(
            record=record, context_tokens=10**index, tokens_to_fill=2 * 10**index, expected_since_s=0.0, span=span
        )
        table.expect(attempt)
    return table


def test_what_no_report_shows_counts_by_class(table):
    assert table.unseen_tokens() == (1, 10, 100)


def test_what_was_given_counts_by_class_whether_a_report_shows_it_or_not(table):
    table.note_reported([held("a"), held("b"), held("c")], num_in_engine=3)
    assert table.num_outstanding() == (1, 1, 1)
    assert table.tokens_to_fill() == (2, 20, 200)


def test_an_urgent_attempt_counts_for_the_highest_class_whatever_its_own(table):
    table.find(ref("c")).is_urgent = True
    assert table.num_outstanding() == (2, 1, 0)
    assert table.unseen_tokens() == (101, 10, 0)
    assert table.tokens_to_fill() == (202, 20, 0)


def test_what_has_made_a_token_has_nothing_to_fill_any_more(table):
    table.find(ref("b")).record.charged_attempts = 0
    table.note_added(ref("b"))
    assert table.tokens_to_fill() == (2, 0, 200)
    assert table.num_outstanding() == (1, 1, 1)


def test_a_report_shows_the_oldest_of_what_is_named_as_many_as_it_counts(table):
    everything = [held("a"), held("b"), held("c")]
    table.note_reported(everything, num_in_engine=2)
    assert table.unseen_tokens() == (0, 0, 100)
    table.note_reported(everything, num_in_engine=3)
    assert table.unseen_tokens() == (0, 0, 0)
    table.note_reported([held("c")], num_in_engine=5)
    assert table.unseen_tokens() == (1, 10, 0)


def test_what_has_finished_needs_no_memory_any_more(table):
    named = [replace(held("a"), is_finished=True), held("b"), held("c")]
    table.note_reported(named, num_in_engine=1)
    assert table.unseen_tokens() == (0, 0, 100)


def test_what_is_over_does_not_count(table):
    table.forget(ref("c"))
    assert table.unseen_tokens() == (1, 10, 0)
