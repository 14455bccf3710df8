"""Generations of all tenants as an operator sees and ends them. Texts are shown only where they are asked for."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from gateway.records import RecordReader
from scheduler.cancel_hints import CancelHints
from service_kit.errors import UnavailableError
from service_kit.ids import GenerationId, is_generation_id
from sluice.console import say
from sluice.errors import UserError
from sluice.listing import Value
from state_store.delta_log.port import DeltaLogReader
from state_store.model import AttemptRecord, CancelCause, GenerationRecord, GenerationRow, PriorityClass, State
from state_store.ports import GenerationStore

COLUMNS = (
    "generation_id",
    "tenant",
    "request_id",
    "model",
    "class",
    "state",
    "attempts",
    "prompt_tokens",
    "output_tokens",
    "created_at",
    "started_at",
    "ended_at",
    "cause",
)
SHOWN = ("generation_id", "tenant", "model", "class", "state", "attempts", "output_tokens", "created_at", "cause")
TIMELINE_COLUMNS = ("at", "after_s", "event", "attempt", "worker", "session_id", "position", "details")
TIMELINE_SHOWN = ("at", "after_s", "event", "attempt", "worker", "position", "details")
_POLL_S = 0.05

Row = dict[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """A generation with its attempts; `text` only when it was asked for."""

    record: GenerationRecord
    attempts: tuple[AttemptRecord, ...]
    text: str | None = None


def parse_states(values: Sequence[str]) -> tuple[State, ...]:
    """Raises UserError."""
    try:
        return tuple(State(value.upper()) for value in values)
    except ValueError:
        raise UserError(f"--state: give some of {', '.join(state.lower() for state in State)}") from None


def parse_class(value: str) -> PriorityClass:
    """Raises UserError."""
    try:
        return PriorityClass(value.upper())
    except ValueError:
        raise UserError(f"--class: give one of {', '.join(each.lower() for each in PriorityClass)}") from None


async def find_details(store: GenerationStore, text: str, *, log: DeltaLogReader | None = None) -> Details:
    """With a `log` the output as well, of a live one as far as it is. Raises UserError when there is no such generation."""
    [record] = await _find(store, [text])
    attempts = await store.attempts_of(record.generation_id)
    shown = None
    if log is not None:
        found = await RecordReader(store=store, log=log).with_output(record)
        record, shown = found.record, found.output.text if found.output is not None else ""
    return Details(record=record, attempts=tuple(attempts), text=shown)


async def cancel(
    store: GenerationStore, hints: CancelHints, texts: Sequence[str], *, patience: timedelta
) -> list[GenerationRecord]:
    """Records the wish, tells the schedulers, and waits for the ends; returns the records afterwards. What has ended before
    stays as it is. Raises UserError, before anything is done, when one of them is unknown."""
    ids = [record.generation_id for record in await _find(store, texts)]
    await store.request_cancel_many([(generation_id, CancelCause.CLIENT) for generation_id in ids])
    try:
        await hints.publish(ids)
    except UnavailableError:
        say("Redis cannot be reached: the schedulers find it in the record within seconds")
    records = await _find(store, ids)
    try:
        async with asyncio.timeout(patience.total_seconds()):
            while any(not record.state.is_terminal for record in records):
                await asyncio.sleep(_POLL_S)
                records = await _find(store, ids)
    except TimeoutError:
        pass
    return records


async def _find(store: GenerationStore, texts: Sequence[str]) -> list[GenerationRecord]:
    ids = [GenerationId(text.lower()) for text in texts]
    found = await store.get_many(ids)
    for text, record in zip(texts, found, strict=True):
        if record is None:
            kept = await store.ledger_of(GenerationId(text.lower())) if is_generation_id(text.lower()) else []
            raise UserError(f"the generation {text} is no longer kept" if kept else f"there is no generation {text}")
    return [record for record in found if record is not None]


def generation_fields(record: GenerationRow) -> Row:
    """All COLUMNS."""
    return {
        "generation_id": record.generation_id,
        "tenant": record.tenant_id,
        "request_id": record.request_id,
        "model": record.model,
        "class": record.priority_class.value,
        "state": record.state.value,
        "attempts": record.attempt,
        "prompt_tokens": record.num_prompt_tokens,
        "output_tokens": record.output_tokens,
        "created_at": record.created_at,
        "started_at": record.started_at,
        "ended_at": record.finished_at,
        "cause": record.error_reason or (record.cancel_cause.value if record.cancel_cause is not None else None),
    }


def details_fields(details: Details) -> Row:
    """Neither prompt nor output, unless the details have text."""
    record = details.record
    facts = generation_fields(record) | {
        "key_id": record.key_id,
        "revision": record.model_key.revision,
        "precision": record.model_key.precision,
        "seed": record.seed,
        "max_output_tokens": record.sampling.max_output_tokens,
        "charged_attempts": record.charged_attempts,
        "session_id": record.session_id,
        "cached_prompt_tokens": record.cached_prompt_tokens,
        "finish_reason": record.finish_reason.value if record.finish_reason is not None else None,
        "error": record.error_message,
        "grace_s": record.grace.total_seconds() if record.grace is not None else None,
        "queue_deadline_at": record.queue_deadline_at,
        "deadline_at": record.deadline_at,
        "is_stored": record.is_stored,
        "texts_deleted_at": record.texts_deleted_at,
    }
    if details.text is not None:
        facts |= {"prompt_token_ids": tuple(map(str, record.prompt_token_ids)), "output": details.text}
    return facts


def printable(text: Value) -> str:
    """One line without control characters: a model's words must not steer the operator's terminal."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in str(text))


def timeline(details: Details) -> list[Row]:
    """What happened, in this order."""
    record = details.record
    events = [_event(record, record.created_at, "ACCEPTED")]
    for attempt in details.attempts:
        own: Row = {"attempt": attempt.attempt, "worker": attempt.worker_id, "session_id": attempt.session_id}
        events.append(_event(record, attempt.granted_at, "GRANTED", **own))
        if attempt.ended_at is not None:
            outcome = attempt.outcome.value if attempt.outcome is not None else "ENDED"
            charge = "charged" if attempt.is_charged else None
            events.append(
                _event(record, attempt.ended_at, outcome, **own, position=attempt.end_position, details=charge)
            )
    if record.finished_at is not None:
        why = record.error_reason or record.finish_reason or record.cancel_cause
        events.append(
            _event(
                record,
                record.finished_at,
                record.state.value,
                position=record.output_tokens,
                details=str(why) if why is not None else None,
            )
        )
    if record.texts_deleted_at is not None:
        events.append(_event(record, record.texts_deleted_at, "TEXTS_DELETED"))
    return events


def _event(record: GenerationRecord, at: datetime, name: str, **fields: Value) -> Row:
    after_s = round((at - record.created_at).total_seconds(), 3)
    return dict.fromkeys(TIMELINE_COLUMNS) | {"at": at, "after_s": after_s, "event": name} | fields
