"""Generations whose attempts were used up: what is known of them, and how one is run again."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from service_kit.ids import GenerationId, RequestId, is_generation_id, new_generation_id
from sluice.errors import UserError
from sluice.listing import table
from state_store.model import AttemptRecord, DeadLetter, GenerationRecord, NewGeneration
from state_store.ports import DeadLetterFilter, GenerationStore, SubmitKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """A dead letter with its generation's row and attempts."""

    letter: DeadLetter
    record: GenerationRecord
    attempts: tuple[AttemptRecord, ...]


async def find_details(store: GenerationStore, text: str) -> Details:
    """Raises UserError when no dead letter has this id."""
    wanted = DeadLetterFilter(generation_id=GenerationId(text))
    letters = await store.dead_letters(limit=1, wanted=wanted) if is_generation_id(text) else []
    (record,) = await store.get_many([GenerationId(text)]) if is_generation_id(text) else [None]
    if not letters:
        state = f"it is {record.state}" if record is not None else "there is no such generation"
        raise UserError(f"{text} is no dead letter: {state}")
    if record is None:
        raise UserError(f"the generation {text} is no longer kept")
    attempts = await store.attempts_of(record.generation_id)
    return Details(letter=letters[0], record=record, attempts=tuple(attempts))


async def requeue(store: GenerationStore, text: str, *, request_id: str | None = None) -> GenerationRecord:
    """Commits a new generation with the dead one's request and seed; schedulers queue it within 3 s. With a `request_id`
    of one's own, repeating the call finds what the first one made. Raises UserError."""
    dead = (await find_details(store, text)).record
    if dead.texts_deleted_at is not None:
        raise UserError(f"{text} was not to be stored: its prompt was deleted")
    (result,) = await store.submit_many([again(dead, request_id=request_id)])
    if result.kind is SubmitKind.CONFLICT:
        raise UserError(f"the request id {request_id} stands for another request of tenant {dead.tenant_id}")
    return result.record


def again(dead: GenerationRecord, *, request_id: str | None) -> NewGeneration:
    """The request of a dead generation as a new one. Nobody is reading it yet, so no grace period ends it."""
    generation_id = new_generation_id()
    return NewGeneration(
        generation_id=generation_id,
        tenant_id=dead.tenant_id,
        key_id=dead.key_id,
        request_id=RequestId(request_id or f"requeue-{generation_id}"),
        request_hash=hashlib.sha256(f"requeue of {dead.generation_id}".encode()).digest(),
        model=dead.model,
        model_key=dead.model_key,
        priority_class=dead.priority_class,
        prompt_token_ids=dead.prompt_token_ids,
        sampling=dead.sampling,
        grace=None,
        queue_timeout=dead.queue_deadline_at - dead.created_at,
        deadline=dead.deadline_at - dead.created_at if dead.deadline_at is not None else None,
        traceparent="",
        requeue_of=dead.generation_id,
        is_stored=dead.is_stored,
    )


def letter_fields(letter: DeadLetter) -> dict[str, Any]:
    """For JSON."""
    return {
        "generation_id": letter.generation_id,
        "tenant": letter.tenant_id,
        "cause": letter.reason,
        "message": letter.message,
        "attempts": letter.attempts,
        "workers": list(letter.worker_ids),
        "died_at": letter.created_at.isoformat(),
    }


def details_fields(details: Details) -> dict[str, Any]:
    """For JSON. Neither prompt nor output."""
    record = details.record
    return letter_fields(details.letter) | {
        "request_id": record.request_id,
        "model": record.model,
        "revision": record.model_key.revision,
        "class": record.priority_class.value,
        "prompt_tokens": record.num_prompt_tokens,
        "output_tokens": record.output_tokens,
        "charged_attempts": record.charged_attempts,
        "created_at": record.created_at.isoformat(),
        "executions": [_attempt_fields(attempt) for attempt in details.attempts],
    }


def _attempt_fields(attempt: AttemptRecord) -> dict[str, Any]:
    return {
        "attempt": attempt.attempt,
        "worker": attempt.worker_id,
        "session_id": attempt.session_id,
        "granted_at": attempt.granted_at.isoformat(),
        "ended_at": attempt.ended_at.isoformat() if attempt.ended_at is not None else None,
        "outcome": attempt.outcome.value if attempt.outcome is not None else None,
        "end_position": attempt.end_position,
        "is_charged": attempt.is_charged,
    }


def render_letters(letters: Sequence[DeadLetter]) -> list[str]:
    """A table, one line each."""
    return table(
        ("GENERATION", "TENANT", "CAUSE", "ATTEMPTS", "WORKERS", "DIED"),
        [
            (
                letter.generation_id,
                letter.tenant_id,
                letter.reason,
                str(letter.attempts),
                ",".join(dict.fromkeys(letter.worker_ids)) or "-",
                _time(letter.created_at),
            )
            for letter in letters
        ],
    )


def render_details(details: Details) -> list[str]:
    """Facts, then a table of the attempts."""
    letter, record = details.letter, details.record
    facts = [
        ("generation", letter.generation_id),
        ("request", record.request_id),
        ("tenant", letter.tenant_id),
        ("model", f"{record.model}, revision {record.model_key.revision}, {record.priority_class}"),
        ("tokens", f"{record.num_prompt_tokens} prompt, {record.output_tokens} output"),
        ("cause", f"{letter.reason}: {letter.message}"),
        ("created", _time(record.created_at)),
        ("died", _time(letter.created_at)),
    ]
    attempts = [
        (
            str(attempt.attempt),
            attempt.worker_id,
            _time(attempt.granted_at),
            f"{(attempt.ended_at - attempt.granted_at).total_seconds():.2f} s" if attempt.ended_at is not None else "-",
            attempt.outcome.value if attempt.outcome is not None else "-",
            str(attempt.end_position) if attempt.end_position is not None else "-",
            "yes" if attempt.is_charged else "no",
        )
        for attempt in details.attempts
    ]
    heads = ("ATTEMPT", "WORKER", "GRANTED", "RAN", "OUTCOME", "REACHED", "CHARGED")
    return [*(f"{name:<12}{value}" for name, value in facts), "", *table(heads, attempts)]


def _time(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
