"""Histories for tests of the oracle: a good one, and what is changed about it."""

from collections.abc import Sequence
from dataclasses import replace

from gpu_worker.engine.simulated_tokens import expected_output
from service_kit.delta import Cursor, extend_chain
from tests.chaos.history import (
    AttemptRow,
    ChunkRow,
    Ending,
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


def says(prior: Sequence[int], nonce: int, count: int) -> list[int]:
    return expected_output(prompt_token_ids=PROMPT, prior_output=prior, seed=SEED, nonce=nonce, count=count)


def output_of() -> list[int]:
    first = says((), NONCES[0], CUT)
    return first + says(first, NONCES[1], LENGTH - CUT)


def chain_of(token_ids: Sequence[int]) -> int:
    return extend_chain(0, token_ids)


def chunk_of(token_ids: Sequence[int], first: int, last: int) -> ChunkRow:
    part = tuple(token_ids[first - 1 : last])
    return ChunkRow(
        generation_id=ID,
        first=first,
        token_ids=part,
        texts=tuple(map(chr, part)),
        prev_chain=chain_of(token_ids[: first - 1]),
        chain=chain_of(token_ids[:last]),
    )


def piece_of(token_ids: Sequence[int], first: int, last: int) -> Piece:
    part = tuple(token_ids[first - 1 : last])
    end = Cursor(sequence_number=last, chain=chain_of(token_ids[:last]))
    return Piece(token_ids=part, text="".join(map(chr, part)), end=end)


def visit_of(pieces: Sequence[Piece], start: Cursor | None = None, reader: str = "r/0") -> Visit:
    ending = Ending(finish_reason="LENGTH", prompt_tokens=len(PROMPT), output_tokens=LENGTH)
    return Visit(
        request_id="r",
        reader=reader,
        start=start or Cursor(),
        accepted_ids=(ID,),
        pieces=tuple(pieces),
        ending=ending,
    )


def made_history(token_ids: list[int] | None = None) -> History:
    """Two attempts, two chunk rows, one reader that came back and one that stayed."""
    said = token_ids if token_ids is not None else output_of()
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
    left = replace(visit_of([piece_of(said, 1, 3)]), ending=None)
    return History(
        wishes=(WISH,),
        visits=(
            left,
            visit_of([piece_of(said, 4, CUT), piece_of(said, CUT + 1, count)], start=left.cursor),
            visit_of([piece_of(said, 1, count)], reader="r/1"),
        ),
        generations=(row,),
        attempts=attempts,
        chunks=(chunk_of(said, 1, CUT), chunk_of(said, CUT + 1, count)),
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


def kinds_of(history: History) -> set[Kind]:
    return {finding.kind for finding in judge(history, simulated_predictions())}


def with_row(**changes: object) -> History:
    history = made_history()
    return replace(history, generations=(replace(history.generations[0], **changes),))  # type: ignore[arg-type]


def with_visit(*visits: Visit, can_lose_output: bool = False) -> History:
    return replace(made_history(), visits=visits, can_lose_output=can_lose_output)
