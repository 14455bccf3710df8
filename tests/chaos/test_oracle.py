"""The oracle finds what is wrong in doctored histories, and nothing in good ones."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gpu_worker.engine.simulated_tokens import expected_output
from service_kit.delta import Cursor, extend_chain
from tests.chaos.history import (
    AttemptRow,
    ChunkRow,
    Ending,
    Failure,
    GenerationRow,
    GrantRow,
    History,
    LedgerRow,
    Piece,
    Visit,
    Wish,
)
from tests.chaos.oracle import Kind, judge
from tests.chaos.simulated import simulated_predictions

ID = "00000000-0000-7000-8000-000000000001"
PROMPT = (256, 104, 105)
SEED = 3
NONCES = (11, 22)
LENGTH = 20
CUT = 8
"""Attempt 1 made tokens 1 to 8, attempt 2 the rest."""
WISH = Wish(request_id="r", text="hi", max_output_tokens=LENGTH)


def _says(prior: Sequence[int], nonce: int, count: int) -> list[int]:
    return expected_output(prompt_token_ids=PROMPT, prior_output=prior, seed=SEED, nonce=nonce, count=count)


def _output() -> list[int]:
    first = _says((), NONCES[0], CUT)
    return first + _says(first, NONCES[1], LENGTH - CUT)


def _chain(token_ids: Sequence[int]) -> int:
    return extend_chain(0, token_ids)


def _chunk(token_ids: Sequence[int], first: int, last: int) -> ChunkRow:
    part = tuple(token_ids[first - 1 : last])
    return ChunkRow(
        generation_id=ID,
        first=first,
        token_ids=part,
        texts=tuple(map(chr, part)),
        prev_chain=_chain(token_ids[: first - 1]),
        chain=_chain(token_ids[:last]),
    )


def _piece(token_ids: Sequence[int], first: int, last: int) -> Piece:
    part = tuple(token_ids[first - 1 : last])
    end = Cursor(sequence_number=last, chain=_chain(token_ids[:last]))
    return Piece(token_ids=part, text="".join(map(chr, part)), end=end)


def _visit(pieces: Sequence[Piece], start: Cursor | None = None, reader: str = "r/0") -> Visit:
    ending = Ending(finish_reason="LENGTH", prompt_tokens=len(PROMPT), output_tokens=LENGTH)
    return Visit(
        request_id="r",
        reader=reader,
        start=start or Cursor(),
        accepted_ids=(ID,),
        pieces=tuple(pieces),
        ending=ending,
    )


def _history(token_ids: list[int] | None = None) -> History:
    """Two attempts, two chunk rows, one reader that came back and one that stayed."""
    said = token_ids if token_ids is not None else _output()
    count = len(said)
    row = GenerationRow(
        generation_id=ID,
        request_id="r",
        state="SUCCEEDED",
        attempt=2,
        prompt_token_ids=PROMPT,
        seed=SEED,
        temperature=0.0,
        finish_reason="LENGTH",
        error_reason=None,
        output_tokens=count,
    )
    attempts = (
        AttemptRow(
            generation_id=ID, attempt=1, session_id="a", nonce=NONCES[0], outcome="SESSION_LOST", end_position=CUT
        ),
        AttemptRow(
            generation_id=ID, attempt=2, session_id="b", nonce=NONCES[1], outcome="FINISHED", end_position=count
        ),
    )
    left = replace(_visit([_piece(said, 1, 3)]), ending=None)
    return History(
        wishes=(WISH,),
        visits=(
            left,
            _visit([_piece(said, 4, CUT), _piece(said, CUT + 1, count)], start=left.cursor),
            _visit([_piece(said, 1, count)], reader="r/1"),
        ),
        generations=(row,),
        attempts=attempts,
        chunks=(_chunk(said, 1, CUT), _chunk(said, CUT + 1, count)),
        ledger=(LedgerRow(generation_id=ID, state="SUCCEEDED", prompt_tokens=len(PROMPT), output_tokens=count),),
        grants=(
            GrantRow(
                generation_id=ID,
                attempt=1,
                session_id="a",
                granter="scheduler",
                owner="scheduler",
                owner_epoch=1,
                session_state="LIVE",
            ),
        ),
    )


def _kinds(history: History) -> set[Kind]:
    return {finding.kind for finding in judge(history, simulated_predictions())}


def _with_row(**changes: object) -> History:
    history = _history()
    return replace(history, generations=(replace(history.generations[0], **changes),))  # type: ignore[arg-type]


def _with_visit(*visits: Visit, can_lose_output: bool = False) -> History:
    return replace(_history(), visits=visits, can_lose_output=can_lose_output)


def test_a_good_history_has_no_findings() -> None:
    assert judge(_history(), simulated_predictions()) == []


def test_an_accepted_generation_that_is_gone_is_lost() -> None:
    history = _history()
    assert Kind.LOST in _kinds(replace(history, generations=(), attempts=(), chunks=(), ledger=()))


def test_a_request_that_was_never_accepted_is_a_failure() -> None:
    refused = Visit(request_id="r", failure=Failure(kind="GaveUpError", reason="UNAVAILABLE", message="gave up"))
    history = replace(_history(), visits=(refused,), generations=(), attempts=(), chunks=(), ledger=(), grants=())
    assert _kinds(history) == {Kind.FAILURE}


def test_a_client_that_misses_a_number_has_a_gap() -> None:
    said = _output()
    assert _kinds(_with_visit(_visit([_piece(said, 1, 5), _piece(said, 7, LENGTH)]))) == {Kind.GAP}


def test_a_client_that_gets_a_number_twice_has_a_duplicate() -> None:
    said = _output()
    assert _kinds(_with_visit(_visit([_piece(said, 1, 5), _piece(said, 5, LENGTH)]))) == {Kind.DUPLICATE}


def test_a_client_that_comes_back_and_is_sent_what_it_has_gets_a_duplicate() -> None:
    said = _output()
    start = Cursor(sequence_number=5, chain=_chain(said[:5]))
    assert _kinds(_with_visit(_visit([_piece(said, 5, LENGTH)], start=start))) == {Kind.DUPLICATE}


def test_an_end_that_comes_before_the_last_token_is_a_gap() -> None:
    assert _kinds(_with_visit(_visit([_piece(_output(), 1, LENGTH - 1)]))) == {Kind.GAP}


@pytest.mark.parametrize(("sent", "kind"), [(9, Kind.GAP), (5, Kind.DUPLICATE)])
def test_what_the_client_itself_refuses_is_named_as_gap_or_duplicate(sent: int, kind: Kind) -> None:
    message = f"expected token 7 next, the server sent {sent}"
    failure = Failure(kind="StreamBrokenError", reason="OUTPUT_CONTRADICTED", message=message)
    visit = replace(_visit([_piece(_output(), 1, 6)]), ending=None, failure=failure)
    assert _kinds(_with_visit(visit)) == {kind}


def test_a_hole_in_the_stored_output_is_a_gap() -> None:
    said = _output()
    history = replace(_history(), chunks=(_chunk(said, 1, CUT), _chunk(said, CUT + 2, LENGTH)))
    assert Kind.GAP in _kinds(history)


def test_stored_output_that_overlaps_is_a_duplicate() -> None:
    said = _output()
    assert Kind.DUPLICATE in _kinds(replace(_history(), chunks=(_chunk(said, 1, CUT), _chunk(said, CUT, LENGTH))))


def test_a_chain_that_is_not_that_of_the_ids_is_a_mismatch() -> None:
    history = _history()
    assert _kinds(replace(history, chunks=(history.chunks[0], replace(history.chunks[1], chain=1)))) == {Kind.MISMATCH}


def test_a_splice_of_two_attempts_with_a_consistent_chain_is_a_mismatch() -> None:
    late = _says((), NONCES[0], CUT + 3)
    spliced = late + _says(late, NONCES[1], LENGTH - len(late))
    findings = judge(_history(spliced), simulated_predictions())
    assert [finding.kind for finding in findings] == [Kind.MISMATCH]
    assert f"token {CUT + 1} of {LENGTH}" in findings[0].text


def test_a_splice_that_later_returns_to_the_other_attempt_is_a_mismatch_without_recorded_ends() -> None:
    """The naive log: attempt 1's late tokens stand where attempt 2's belong, and attempt 2's follow."""
    first = _says((), NONCES[0], CUT)
    second = first + _says(first, NONCES[1], LENGTH - CUT)
    late = _says(first, NONCES[0], 3)
    spliced = [*first, *late, *second[CUT + 3 :]]
    history = _history(spliced)
    attempts = (replace(history.attempts[0], outcome=None, end_position=None), history.attempts[1])
    assert _kinds(replace(history, attempts=attempts)) == {Kind.MISMATCH}


def test_a_single_foreign_token_is_a_mismatch() -> None:
    said = _output()
    said[CUT - 1] = said[CUT - 1] % 90 + 33
    assert _kinds(_history(said)) == {Kind.MISMATCH}


def test_an_attempt_whose_end_is_unknown_may_have_made_any_part_in_order() -> None:
    history = _history()
    attempts = (replace(history.attempts[0], outcome=None, end_position=None), history.attempts[1])
    assert _kinds(replace(history, attempts=attempts)) == set()


def test_a_client_that_saw_another_token_than_is_stored_is_a_mismatch() -> None:
    said = _output()
    other = [*said[:-1], said[-1] % 90 + 33]
    assert _kinds(_with_visit(_visit([_piece(other, 1, LENGTH)]))) == {Kind.MISMATCH}


def test_a_client_that_saw_another_text_is_a_mismatch() -> None:
    piece = replace(_piece(_output(), 1, LENGTH), text="x" * LENGTH)
    assert _kinds(_with_visit(_visit([piece]))) == {Kind.MISMATCH}


def test_a_stored_text_that_is_not_that_of_the_ids_is_a_mismatch() -> None:
    history = _history()
    texts = ("", *history.chunks[0].texts[1:])
    assert Kind.MISMATCH in _kinds(
        replace(history, chunks=(replace(history.chunks[0], texts=texts), history.chunks[1]))
    )


def test_a_missing_ledger_row_is_not_charged() -> None:
    assert _kinds(replace(_history(), ledger=())) == {Kind.NOT_CHARGED}


def test_two_ledger_rows_are_a_double_charge() -> None:
    history = _history()
    assert _kinds(replace(history, ledger=history.ledger * 2)) == {Kind.DOUBLE_CHARGE}


def test_a_ledger_row_with_other_usage_is_a_mismatch() -> None:
    history = _history()
    ledger = (replace(history.ledger[0], output_tokens=LENGTH - 1),)
    assert _kinds(replace(history, ledger=ledger)) == {Kind.MISMATCH}


def test_a_row_that_is_not_final_is_not_terminal() -> None:
    assert _kinds(_with_row(state="RUNNING", finish_reason=None)) == {Kind.NOT_TERMINAL}


def test_usage_that_is_not_the_stored_output_is_a_mismatch() -> None:
    assert Kind.MISMATCH in _kinds(_with_row(output_tokens=LENGTH + 1))


def test_an_end_by_length_before_the_length_is_a_mismatch() -> None:
    assert Kind.MISMATCH in _kinds(_history(_output()[:-1]))


def test_a_client_that_heard_another_end_than_is_recorded_is_a_mismatch() -> None:
    visit = replace(_history().visits[2], ending=Ending(finish_reason="STOP", prompt_tokens=3, output_tokens=LENGTH))
    assert _kinds(_with_visit(visit)) == {Kind.MISMATCH}


def test_a_failed_generation_is_a_failure() -> None:
    assert Kind.FAILURE in _kinds(_with_row(state="FAILED", finish_reason=None, error_reason="ATTEMPTS_EXHAUSTED"))


def test_a_cancel_that_nobody_asked_for_is_a_mismatch() -> None:
    assert Kind.MISMATCH in _kinds(_with_row(state="CANCELLED", finish_reason="CANCELLED"))


def test_two_generations_of_one_request_id_are_found() -> None:
    history = _history()
    twin = replace(history.generations[0], generation_id=ID[:-1] + "2")
    assert Kind.TWO_GENERATIONS in _kinds(replace(history, generations=(*history.generations, twin)))


def test_an_attempt_that_is_not_noted_is_a_mismatch() -> None:
    assert Kind.MISMATCH in _kinds(_with_row(attempt=3))


def test_a_grant_by_another_than_the_owner_is_foreign() -> None:
    history = _history()
    grants = (replace(history.grants[0], owner="scheduler-2"),)
    assert _kinds(replace(history, grants=grants)) == {Kind.FOREIGN_GRANT}


def test_a_grant_to_a_session_that_is_over_is_foreign() -> None:
    history = _history()
    grants = (replace(history.grants[0], session_state="LOST"),)
    assert _kinds(replace(history, grants=grants)) == {Kind.FOREIGN_GRANT}


def test_a_final_row_that_is_written_again_is_found() -> None:
    assert _kinds(replace(_history(), changed_after_end=(ID,))) == {Kind.CHANGED_AFTER_END}


def _told_of_a_loss(seen: Sequence[int]) -> tuple[Visit, Visit]:
    """Saw this, left, came back and was told that it is gone."""
    left = replace(_visit([_piece(seen, 1, len(seen))]), ending=None)
    failure = Failure(kind="DataLossError", reason="OUTPUT_CONTRADICTED", message="another output")
    return left, Visit(request_id="r", reader="r/0", start=left.cursor, accepted_ids=(ID,), failure=failure)


def test_a_proven_loss_is_permitted_when_the_log_and_the_worker_were_lost() -> None:
    seen = _says((), NONCES[0], CUT + 4)
    assert _kinds(_with_visit(*_told_of_a_loss(seen), can_lose_output=True)) == {Kind.PERMITTED_DATA_LOSS}


def test_a_loss_is_not_permitted_when_only_one_of_them_was_lost() -> None:
    seen = _says((), NONCES[0], CUT + 4)
    assert _kinds(_with_visit(*_told_of_a_loss(seen))) == {Kind.DATA_LOSS}


def test_a_loss_that_the_chain_refutes_is_not_permitted() -> None:
    assert _kinds(_with_visit(*_told_of_a_loss(_output()[:5]), can_lose_output=True)) == {Kind.DATA_LOSS}


def test_what_was_seen_before_a_permitted_loss_must_be_an_attempts_output() -> None:
    history = _with_visit(*_told_of_a_loss([33] * 9), can_lose_output=True)
    assert _kinds(history) == {Kind.PERMITTED_DATA_LOSS, Kind.MISMATCH}


def test_any_other_error_is_a_failure() -> None:
    failure = Failure(kind="GaveUpError", reason="UNAVAILABLE", message="gave up")
    visit = replace(_visit([_piece(_output(), 1, 4)]), ending=None, failure=failure)
    assert _kinds(_with_visit(visit)) == {Kind.FAILURE}


def _stopped(stop: str) -> History:
    """Ends by STOP where attempt 2 says its next token."""
    said = _output()[: LENGTH - 1]
    history = _history(said)
    row = replace(history.generations[0], finish_reason="STOP")
    visit = replace(history.visits[2], ending=Ending(finish_reason="STOP", prompt_tokens=3, output_tokens=LENGTH - 1))
    return replace(history, wishes=(replace(WISH, stop=stop),), generations=(row,), visits=(visit,))


def test_a_stop_where_the_attempt_says_the_stop_string_is_good() -> None:
    assert _kinds(_stopped(chr(_output()[-1]))) == set()


def test_a_stop_where_the_attempt_says_something_else_is_a_mismatch() -> None:
    assert _kinds(_stopped(chr(_output()[-1] % 90 + 33))) == {Kind.MISMATCH}
