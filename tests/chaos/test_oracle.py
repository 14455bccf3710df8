"""The oracle finds what is wrong in doctored histories, and nothing in good ones."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from service_kit.delta import Cursor
from tests.chaos.histories import (
    CUT,
    ID,
    LENGTH,
    NONCES,
    WISH,
    chain_of,
    chunk_of,
    kinds_of,
    made_history,
    output_of,
    piece_of,
    says,
    visit_of,
    with_row,
    with_visit,
)
from tests.chaos.history import (
    Ending,
    Failure,
    History,
    Visit,
)
from tests.chaos.oracle import Kind, judge
from tests.chaos.simulated import simulated_predictions


def test_a_good_history_has_no_findings() -> None:
    assert judge(made_history(), simulated_predictions()) == []


def test_an_accepted_generation_that_is_gone_is_lost() -> None:
    history = made_history()
    assert Kind.LOST in kinds_of(replace(history, generations=(), attempts=(), chunks=(), ledger=()))


def test_a_request_that_was_never_accepted_is_a_failure() -> None:
    refused = Visit(request_id="r", failure=Failure(kind="GaveUpError", reason="UNAVAILABLE", message="gave up"))
    history = replace(made_history(), visits=(refused,), generations=(), attempts=(), chunks=(), ledger=(), grants=())
    assert kinds_of(history) == {Kind.FAILURE}


def test_a_client_that_misses_a_number_has_a_gap() -> None:
    said = output_of()
    assert kinds_of(with_visit(visit_of([piece_of(said, 1, 5), piece_of(said, 7, LENGTH)]))) == {Kind.GAP}


def test_a_client_that_gets_a_number_twice_has_a_duplicate() -> None:
    said = output_of()
    assert kinds_of(with_visit(visit_of([piece_of(said, 1, 5), piece_of(said, 5, LENGTH)]))) == {Kind.DUPLICATE}


def test_a_client_that_comes_back_and_is_sent_what_it_has_gets_a_duplicate() -> None:
    said = output_of()
    start = Cursor(sequence_number=5, chain=chain_of(said[:5]))
    assert kinds_of(with_visit(visit_of([piece_of(said, 5, LENGTH)], start=start))) == {Kind.DUPLICATE}


def test_an_end_that_comes_before_the_last_token_is_a_gap() -> None:
    assert kinds_of(with_visit(visit_of([piece_of(output_of(), 1, LENGTH - 1)]))) == {Kind.GAP}


@pytest.mark.parametrize(("sent", "kind"), [(9, Kind.GAP), (5, Kind.DUPLICATE)])
def test_what_the_client_itself_refuses_is_named_as_gap_or_duplicate(sent: int, kind: Kind) -> None:
    message = f"expected token 7 next, the server sent {sent}"
    failure = Failure(kind="StreamBrokenError", reason="OUTPUT_CONTRADICTED", message=message)
    visit = replace(visit_of([piece_of(output_of(), 1, 6)]), ending=None, failure=failure)
    assert kinds_of(with_visit(visit)) == {kind}


def test_a_hole_in_the_stored_output_is_a_gap() -> None:
    said = output_of()
    history = replace(made_history(), chunks=(chunk_of(said, 1, CUT), chunk_of(said, CUT + 2, LENGTH)))
    assert Kind.GAP in kinds_of(history)


def test_stored_output_that_overlaps_is_a_duplicate() -> None:
    said = output_of()
    assert Kind.DUPLICATE in kinds_of(
        replace(made_history(), chunks=(chunk_of(said, 1, CUT), chunk_of(said, CUT, LENGTH)))
    )


def test_a_chain_that_is_not_that_of_the_ids_is_a_mismatch() -> None:
    history = made_history()
    assert kinds_of(replace(history, chunks=(history.chunks[0], replace(history.chunks[1], chain=1)))) == {
        Kind.MISMATCH
    }


def test_a_splice_of_two_attempts_with_a_consistent_chain_is_a_mismatch() -> None:
    late = says((), NONCES[0], CUT + 3)
    spliced = late + says(late, NONCES[1], LENGTH - len(late))
    findings = judge(made_history(spliced), simulated_predictions())
    assert [finding.kind for finding in findings] == [Kind.MISMATCH]
    assert f"token {CUT + 1} of {LENGTH}" in findings[0].text


def test_a_splice_that_later_returns_to_the_other_attempt_is_a_mismatch_without_recorded_ends() -> None:
    """The naive log: attempt 1's late tokens stand where attempt 2's belong, and attempt 2's follow."""
    first = says((), NONCES[0], CUT)
    second = first + says(first, NONCES[1], LENGTH - CUT)
    late = says(first, NONCES[0], 3)
    spliced = [*first, *late, *second[CUT + 3 :]]
    history = made_history(spliced)
    attempts = (replace(history.attempts[0], outcome=None, end_position=None), history.attempts[1])
    assert kinds_of(replace(history, attempts=attempts)) == {Kind.MISMATCH}


def test_a_single_foreign_token_is_a_mismatch() -> None:
    said = output_of()
    said[CUT - 1] = said[CUT - 1] % 90 + 33
    assert kinds_of(made_history(said)) == {Kind.MISMATCH}


def test_an_attempt_whose_end_is_unknown_may_have_made_any_part_in_order() -> None:
    history = made_history()
    attempts = (replace(history.attempts[0], outcome=None, end_position=None), history.attempts[1])
    assert kinds_of(replace(history, attempts=attempts)) == set()


def test_a_client_that_saw_another_token_than_is_stored_is_a_mismatch() -> None:
    said = output_of()
    other = [*said[:-1], said[-1] % 90 + 33]
    assert kinds_of(with_visit(visit_of([piece_of(other, 1, LENGTH)]))) == {Kind.MISMATCH}


def test_a_client_that_saw_another_text_is_a_mismatch() -> None:
    piece = replace(piece_of(output_of(), 1, LENGTH), text="x" * LENGTH)
    assert kinds_of(with_visit(visit_of([piece]))) == {Kind.MISMATCH}


def test_a_stored_text_that_is_not_that_of_the_ids_is_a_mismatch() -> None:
    history = made_history()
    texts = ("", *history.chunks[0].texts[1:])
    assert Kind.MISMATCH in kinds_of(
        replace(history, chunks=(replace(history.chunks[0], texts=texts), history.chunks[1]))
    )


def test_a_missing_ledger_row_is_not_charged() -> None:
    assert kinds_of(replace(made_history(), ledger=())) == {Kind.NOT_CHARGED}


def test_two_ledger_rows_are_a_double_charge() -> None:
    history = made_history()
    assert kinds_of(replace(history, ledger=history.ledger * 2)) == {Kind.DOUBLE_CHARGE}


def test_a_ledger_row_with_other_usage_is_a_mismatch() -> None:
    history = made_history()
    ledger = (replace(history.ledger[0], output_tokens=LENGTH - 1),)
    assert kinds_of(replace(history, ledger=ledger)) == {Kind.MISMATCH}


def test_a_row_that_is_not_final_is_not_terminal() -> None:
    assert kinds_of(with_row(state="RUNNING", finish_reason=None)) == {Kind.NOT_TERMINAL}


def test_usage_that_is_not_the_stored_output_is_a_mismatch() -> None:
    assert Kind.MISMATCH in kinds_of(with_row(output_tokens=LENGTH + 1))


def test_an_end_by_length_before_the_length_is_a_mismatch() -> None:
    assert Kind.MISMATCH in kinds_of(made_history(output_of()[:-1]))


def test_a_client_that_heard_another_end_than_is_recorded_is_a_mismatch() -> None:
    visit = replace(
        made_history().visits[2], ending=Ending(finish_reason="STOP", prompt_tokens=3, output_tokens=LENGTH)
    )
    assert kinds_of(with_visit(visit)) == {Kind.MISMATCH}


def test_a_failed_generation_is_a_failure() -> None:
    assert Kind.FAILURE in kinds_of(with_row(state="FAILED", finish_reason=None, error_reason="ATTEMPTS_EXHAUSTED"))


def test_a_cancel_that_nobody_asked_for_is_a_mismatch() -> None:
    assert Kind.MISMATCH in kinds_of(with_row(state="CANCELLED", finish_reason="CANCELLED"))


def test_two_generations_of_one_request_id_are_found() -> None:
    history = made_history()
    twin = replace(history.generations[0], generation_id=ID[:-1] + "2")
    assert Kind.TWO_GENERATIONS in kinds_of(replace(history, generations=(*history.generations, twin)))


def test_an_attempt_that_is_not_noted_is_a_mismatch() -> None:
    assert Kind.MISMATCH in kinds_of(with_row(attempt=3))


def test_a_grant_by_another_than_the_owner_is_foreign() -> None:
    history = made_history()
    grants = (replace(history.grants[0], owner="scheduler-2"),)
    assert kinds_of(replace(history, grants=grants)) == {Kind.FOREIGN_GRANT}


def test_a_grant_to_a_session_that_is_over_is_foreign() -> None:
    history = made_history()
    grants = (replace(history.grants[0], session_state="LOST"),)
    assert kinds_of(replace(history, grants=grants)) == {Kind.FOREIGN_GRANT}


def test_a_final_row_that_is_written_again_is_found() -> None:
    assert kinds_of(replace(made_history(), changed_after_end=(ID,))) == {Kind.CHANGED_AFTER_END}


def _told_of_a_loss(seen: Sequence[int]) -> tuple[Visit, Visit]:
    """Saw this, left, came back and was told that it is gone."""
    left = replace(visit_of([piece_of(seen, 1, len(seen))]), ending=None)
    failure = Failure(kind="DataLossError", reason="OUTPUT_CONTRADICTED", message="another output")
    return left, Visit(request_id="r", reader="r/0", start=left.cursor, accepted_ids=(ID,), failure=failure)


def test_a_proven_loss_is_permitted_when_the_log_and_the_worker_were_lost() -> None:
    seen = says((), NONCES[0], CUT + 4)
    assert kinds_of(with_visit(*_told_of_a_loss(seen), can_lose_output=True)) == {Kind.PERMITTED_DATA_LOSS}


def test_a_loss_is_not_permitted_when_only_one_of_them_was_lost() -> None:
    seen = says((), NONCES[0], CUT + 4)
    assert kinds_of(with_visit(*_told_of_a_loss(seen))) == {Kind.DATA_LOSS}


def test_a_loss_that_the_chain_refutes_is_not_permitted() -> None:
    assert kinds_of(with_visit(*_told_of_a_loss(output_of()[:5]), can_lose_output=True)) == {Kind.DATA_LOSS}


def test_what_was_seen_before_a_permitted_loss_must_be_an_attempts_output() -> None:
    history = with_visit(*_told_of_a_loss([33] * 9), can_lose_output=True)
    assert kinds_of(history) == {Kind.PERMITTED_DATA_LOSS, Kind.MISMATCH}


def test_any_other_error_is_a_failure() -> None:
    failure = Failure(kind="GaveUpError", reason="UNAVAILABLE", message="gave up")
    visit = replace(visit_of([piece_of(output_of(), 1, 4)]), ending=None, failure=failure)
    assert kinds_of(with_visit(visit)) == {Kind.FAILURE}


def _stopped(stop: str) -> History:
    """Ends by STOP where attempt 2 says its next token."""
    said = output_of()[: LENGTH - 1]
    history = made_history(said)
    row = replace(history.generations[0], finish_reason="STOP")
    visit = replace(history.visits[2], ending=Ending(finish_reason="STOP", prompt_tokens=3, output_tokens=LENGTH - 1))
    return replace(history, wishes=(replace(WISH, stop=stop),), generations=(row,), visits=(visit,))


def test_a_stop_where_the_attempt_says_the_stop_string_is_good() -> None:
    assert kinds_of(_stopped(chr(output_of()[-1]))) == set()


def test_a_stop_where_the_attempt_says_something_else_is_a_mismatch() -> None:
    assert kinds_of(_stopped(chr(output_of()[-1] % 90 + 33))) == {Kind.MISMATCH}
