"""Says what is wrong with the history of one trial. Pure: everything it looks at is in the history."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from tests.chaos.history import (
    FINAL_STATES,
    AttemptRow,
    ChunkRow,
    Failure,
    GenerationRow,
    History,
    LedgerRow,
    Output,
    Visit,
    Wish,
)


class Kind(StrEnum):
    """What can be wrong. All but PERMITTED_DATA_LOSS fail the trial."""

    LOST = "LOST"
    """Accepted, and not in the database."""
    GAP = "GAP"
    DUPLICATE = "DUPLICATE"
    MISMATCH = "MISMATCH"
    """Two accounts of one output, usage or end differ."""
    DOUBLE_CHARGE = "DOUBLE_CHARGE"
    NOT_CHARGED = "NOT_CHARGED"
    TWO_GENERATIONS = "TWO_GENERATIONS"
    """One request id, several generations."""
    NOT_TERMINAL = "NOT_TERMINAL"
    CHANGED_AFTER_END = "CHANGED_AFTER_END"
    FOREIGN_GRANT = "FOREIGN_GRANT"
    """A grant to a session by a scheduler that did not own it when the grant was committed."""
    DATA_LOSS = "DATA_LOSS"
    PERMITTED_DATA_LOSS = "PERMITTED_DATA_LOSS"
    FAILURE = "FAILURE"
    """A client was told an error, or heard no end at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong, about one request."""

    kind: Kind
    request_id: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """One generation with what belongs to it, as the checks of its tokens want it."""

    wish: Wish
    row: GenerationRow
    attempts: Sequence[AttemptRow]


CheckTokens = Callable[[Execution, Sequence[int], bool], str | None]
"""(execution, output ids, whether the log may have lost output) → what is wrong with the ids, or None."""
CheckText = Callable[[Execution, Sequence[int], str], str | None]
"""(execution, output ids, the output's text) → what is wrong with the text, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """What the engine must have said."""

    tokens: CheckTokens
    text: CheckText


def judge(history: History, predictions: Predictions) -> list[Finding]:
    """All that is wrong. An empty list, or only PERMITTED_DATA_LOSS, is a good trial."""
    by_request: dict[str, list[GenerationRow]] = defaultdict(list)
    for row in history.generations:
        by_request[row.request_id].append(row)
    findings = [*_accepted(history), *_foreign(history)]
    for wish in history.wishes:
        visits = [visit for visit in history.visits if visit.request_id == wish.request_id]
        rows = by_request.get(wish.request_id, [])
        if len(rows) > 1:
            ids = ", ".join(sorted(row.generation_id for row in rows))
            findings.append(_finding(Kind.TWO_GENERATIONS, wish, f"generations {ids}"))
        if not rows:
            words = "; ".join(visit.failure.message for visit in visits if visit.failure is not None)
            findings.append(_finding(Kind.FAILURE, wish, f"no generation has this request id: {words}"))
        for row in rows:
            attempts = [attempt for attempt in history.attempts if attempt.generation_id == row.generation_id]
            attempts.sort(key=lambda attempt: attempt.attempt)
            execution = Execution(wish=wish, row=row, attempts=attempts)
            findings += _judge_one(execution, visits, history, predictions)
    return findings


def failures(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.kind is not Kind.PERMITTED_DATA_LOSS]


def _finding(kind: Kind, wish: Wish, text: str) -> Finding:
    return Finding(kind=kind, request_id=wish.request_id, text=text)


def _accepted(history: History) -> Iterable[Finding]:
    known = {row.generation_id for row in history.generations}
    for visit in history.visits:
        ids = set(visit.accepted_ids)
        for generation_id in sorted(ids - known):
            yield Finding(kind=Kind.LOST, request_id=visit.request_id, text=f"{generation_id} was accepted and is gone")
        if len(ids) > 1:
            text = f"accepted as {', '.join(sorted(ids))}"
            yield Finding(kind=Kind.TWO_GENERATIONS, request_id=visit.request_id, text=text)


def _foreign(history: History) -> Iterable[Finding]:
    names = {row.generation_id: row.request_id for row in history.generations}
    for grant in history.grants:
        if grant.granter != grant.owner or grant.session_state != "LIVE":
            text = (
                f"attempt {grant.attempt} was granted by {grant.granter} to session {grant.session_id}, which was"
                f" {grant.session_state} and owned by {grant.owner} (epoch {grant.owner_epoch})"
            )
            yield Finding(kind=Kind.FOREIGN_GRANT, request_id=names.get(grant.generation_id, ""), text=text)
    for generation_id in history.changed_after_end:
        text = f"the final row of {generation_id} was written again"
        yield Finding(kind=Kind.CHANGED_AFTER_END, request_id=names.get(generation_id, ""), text=text)


def _judge_one(
    execution: Execution, visits: Sequence[Visit], history: History, predictions: Predictions
) -> list[Finding]:
    wish, row = execution.wish, execution.row
    chunks = [chunk for chunk in history.chunks if chunk.generation_id == row.generation_id]
    ledger = [entry for entry in history.ledger if entry.generation_id == row.generation_id]
    if row.state not in FINAL_STATES:
        return [_finding(Kind.NOT_TERMINAL, wish, f"{row.generation_id} is {row.state} at attempt {row.attempt}")]
    output, findings = join_chunks(wish, chunks)
    findings += [*_end(wish, row, output), *_attempts(execution), *_charge(wish, row, ledger)]
    problem = predictions.tokens(execution, output.token_ids, history.can_lose_output)
    problem = problem or predictions.text(execution, output.token_ids, "".join(output.texts))
    findings += [_finding(Kind.MISMATCH, wish, problem)] if problem else []
    for journey in _journeys(visits):
        findings += _journey(execution, journey, output, history, predictions)
    return findings


def _journeys(visits: Sequence[Visit]) -> list[list[Visit]]:
    by_reader: dict[str, list[Visit]] = defaultdict(list)
    for visit in visits:
        by_reader[visit.reader].append(visit)
    return list(by_reader.values())


def join_chunks(wish: Wish, chunks: Sequence[ChunkRow]) -> tuple[Output, list[Finding]]:
    """The stored output; its numbers must have no gap and no overlap, and its chain must be that of its ids."""
    output, findings = Output(), []
    for chunk in sorted(chunks, key=lambda chunk: chunk.first):
        expected = len(output.token_ids) + 1
        if chunk.first != expected:
            kind = Kind.GAP if chunk.first > expected else Kind.DUPLICATE
            findings.append(_finding(kind, wish, f"stored: number {chunk.first} follows {expected - 1}"))
            return output, findings
        before = output.chains[-1]
        output.add(chunk.token_ids, chunk.texts)
        if (chunk.prev_chain, chunk.chain) != (before, output.chains[-1]):
            text = f"stored: the chain of {chunk.first}-{chunk.last} is not that of its ids"
            findings.append(_finding(Kind.MISMATCH, wish, text))
    return output, findings


def _end(wish: Wish, row: GenerationRow, output: Output) -> Iterable[Finding]:
    count = len(output.token_ids)
    if row.output_tokens != count:
        yield _finding(Kind.MISMATCH, wish, f"usage says {row.output_tokens} tokens, {count} are stored")
    match row.state, row.finish_reason:
        case "SUCCEEDED", "LENGTH":
            if count != wish.max_output_tokens:
                yield _finding(Kind.MISMATCH, wish, f"ended by LENGTH after {count} of {wish.max_output_tokens}")
        case "SUCCEEDED", "STOP":
            pass  # the predictions know where it may stop
        case "CANCELLED", _:
            if not wish.is_cancelled:
                yield _finding(Kind.MISMATCH, wish, "cancelled although nobody asked for it")
        case state, reason:
            yield _finding(Kind.FAILURE, wish, f"ended as {state} {reason or row.error_reason}")


def _attempts(execution: Execution) -> Iterable[Finding]:
    row, numbers = execution.row, [attempt.attempt for attempt in execution.attempts]
    if numbers != list(range(1, row.attempt + 1)):
        yield _finding(Kind.MISMATCH, execution.wish, f"the record counts {row.attempt} attempts, noted are {numbers}")
    for attempt in execution.attempts:
        if attempt.outcome == "FINISHED" and (attempt.attempt, attempt.end_position) != (
            row.attempt,
            row.output_tokens,
        ):
            text = f"attempt {attempt.attempt} finished at {attempt.end_position}, the record at {row.output_tokens}"
            yield _finding(Kind.MISMATCH, execution.wish, text)


def _charge(wish: Wish, row: GenerationRow, ledger: Sequence[LedgerRow]) -> Iterable[Finding]:
    if not ledger:
        yield _finding(Kind.NOT_CHARGED, wish, f"{row.generation_id} has no ledger row")
    if len(ledger) > 1:
        yield _finding(Kind.DOUBLE_CHARGE, wish, f"{row.generation_id} has {len(ledger)} ledger rows")
    expected = (row.state, len(row.prompt_token_ids), row.output_tokens)
    for entry in ledger:
        booked = (entry.state, entry.prompt_tokens, entry.output_tokens)
        if booked != expected:
            yield _finding(Kind.MISMATCH, wish, f"the ledger says {booked}, the record {expected}")


def _journey(
    execution: Execution, visits: Sequence[Visit], output: Output, history: History, predictions: Predictions
) -> list[Finding]:
    """All visits of one reader. One that was told of a loss has seen another output than is stored, as the chain then
    proves; that too must be one which the attempts can have made."""
    wish = execution.wish
    findings = [
        finding
        for visit in visits
        if visit.failure is not None
        for finding in _failure(wish, visit, visit.failure, output, can_lose=history.can_lose_output)
    ]
    if any(visit.failure is not None and _is_loss(visit.failure) for visit in visits):
        seen = [token_id for visit in visits for token_id in visit.token_ids]
        ended = replace(execution, row=replace(execution.row, finish_reason=None))
        problem = predictions.tokens(ended, seen, True)
        return [*findings, *([_finding(Kind.MISMATCH, wish, f"seen before a loss: {problem}")] if problem else [])]
    for visit in visits:
        findings += _visit(wish, visit, output) or _ending(execution, visit, output)
    return findings


def _visit(wish: Wish, visit: Visit, output: Output) -> list[Finding]:
    """The pieces follow each other from the visit's start, and are what is stored there, ids, text and chain."""
    expected = visit.start.sequence_number + 1
    for piece in visit.pieces:
        if piece.first != expected:
            kind = Kind.GAP if piece.first > expected else Kind.DUPLICATE
            return [_finding(kind, wish, f"a client got number {piece.first} behind {expected - 1}")]
        stored = slice(piece.first - 1, piece.end.sequence_number)
        if tuple(output.token_ids[stored]) != piece.token_ids or not output.continues(piece.end):
            return [_finding(Kind.MISMATCH, wish, f"a client saw other tokens at {piece.first} than are stored")]
        if "".join(output.texts[stored]) != piece.text:
            return [_finding(Kind.MISMATCH, wish, f"a client saw another text at {piece.first} than is stored")]
        expected = piece.end.sequence_number + 1
    return []


def _ending(execution: Execution, visit: Visit, output: Output) -> list[Finding]:
    wish, row, ending = execution.wish, execution.row, visit.ending
    if ending is None:
        return []
    findings = []
    heard = (ending.finish_reason, ending.prompt_tokens, ending.output_tokens)
    recorded = (row.finish_reason, len(row.prompt_token_ids), row.output_tokens)
    if heard != recorded:
        findings.append(_finding(Kind.MISMATCH, wish, f"a client heard the end {heard}, the record says {recorded}"))
    if visit.cursor.sequence_number != len(output.token_ids):
        text = f"a client heard the end at {visit.cursor.sequence_number} of {len(output.token_ids)} tokens"
        findings.append(_finding(Kind.GAP, wish, text))
    return findings


def _is_loss(failure: Failure) -> bool:
    return failure.kind != "StreamBrokenError" and failure.reason in ("OUTPUT_CONTRADICTED", "CURSOR_BEYOND_END")


def _failure(wish: Wish, visit: Visit, failure: Failure, output: Output, *, can_lose: bool) -> Iterable[Finding]:
    text = f"{failure.kind} {failure.reason} at {visit.cursor.sequence_number}: {failure.message}"
    if failure.kind == "StreamBrokenError":
        # The client counts for itself; these are its words for what the oracle would have found in the pieces.
        is_gap = "expected token" in failure.message and _sent_later(failure.message)
        is_repeat = "expected token" in failure.message and not is_gap
        yield _finding(Kind.GAP if is_gap else Kind.DUPLICATE if is_repeat else Kind.MISMATCH, wish, text)
    elif _is_loss(failure):
        is_proven = can_lose and not output.continues(visit.cursor)
        yield _finding(Kind.PERMITTED_DATA_LOSS if is_proven else Kind.DATA_LOSS, wish, text)
    else:
        yield _finding(Kind.FAILURE, wish, text)


def _sent_later(message: str) -> bool:
    expected, sent = (int(word) for word in message.replace(",", " ").split() if word.isdigit())
    return sent > expected


def count_kinds(findings: Iterable[Finding]) -> Counter[str]:
    return Counter(finding.kind.value for finding in findings)
