"""Rows ↔ model. Pure. Unsigned 64-bit numbers are stored as two's complement, token ids as little-endian uint32."""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from service_kit.delta import Cursor, Delta
from service_kit.ids import GenerationId
from service_kit.logprob_codec import unpack_logprobs
from service_kit.sampling import FinishReason, SamplingParams
from state_store.model import (
    AttemptOutcome,
    AttemptRecord,
    CancelCause,
    DeadLetter,
    GenerationRecord,
    GenerationSummary,
    LedgerRow,
    ModelKey,
    PriorityClass,
    SessionRecord,
    SessionState,
    State,
)

Row = Mapping[str, Any]
_SIGN_BIT = 1 << 63
_MODULUS = 1 << 64


def to_signed(number: int) -> int:
    return number - _MODULUS if number >= _SIGN_BIT else number


def to_unsigned(number: int) -> int:
    return number % _MODULUS


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_token_ids(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def pack_texts(texts: Iterable[str]) -> tuple[bytes, list[int]]:
    """All texts in one value, and where in it each ends."""
    packed = bytearray()
    ends = []
    for text in texts:
        packed += text.encode("utf-8", "surrogatepass")
        ends.append(len(packed))
    return bytes(packed), ends


def unpack_texts(packed: bytes, ends: Sequence[int]) -> tuple[str, ...]:
    starts = [0, *ends[:-1]]
    return tuple(packed[start:end].decode("utf-8", "surrogatepass") for start, end in zip(starts, ends, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedGeneration:
    """What decisions look at, read under the row's lock."""

    generation_id: str
    tenant_id: str
    request_id: str
    state: State
    attempt: int
    charged_attempts: int
    cancel_cause: CancelCause | None
    model_key: ModelKey


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedSession:
    """What a grant looks at, read under the row's lock."""

    worker_id: str
    state: SessionState
    owner_epoch: int
    model_key: ModelKey


def locked_generation(row: Row) -> LockedGeneration:
    return LockedGeneration(
        generation_id=str(row["generation_id"]),
        tenant_id=row["tenant_id"],
        request_id=row["request_id"],
        state=State(row["state"]),
        attempt=row["attempt"],
        charged_attempts=row["charged_attempts"],
        cancel_cause=CancelCause(row["cancel_cause"]) if row["cancel_cause"] is not None else None,
        model_key=_model_key(row),
    )


def locked_session(row: Row) -> LockedSession:
    return LockedSession(
        worker_id=row["worker_id"],
        state=SessionState(row["state"]),
        owner_epoch=row["owner_epoch"],
        model_key=_model_key(row),
    )


def _model_key(row: Row) -> ModelKey:
    return ModelKey(revision=row["model_revision"], precision=row["model_precision"])


def generation(row: Row) -> GenerationRecord:
    return GenerationRecord(
        **_shared_fields(row),
        nonce=to_unsigned(row["nonce"]),
        prompt_token_ids=unpack_token_ids(row["prompt_token_ids"]),
        sampling=SamplingParams.from_dict(row["sampling"]),
        grace=row["grace"],
        traceparent=row["traceparent"],
        matched_stop=row["matched_stop"],
        deleted_prompt_tokens=row["deleted_prompt_tokens"],
    )


def summary(row: Row) -> GenerationSummary:
    return GenerationSummary(**_shared_fields(row), num_prompt_tokens=row["num_prompt_tokens"], seed=row["seed"] or 0)


def _shared_fields(row: Row) -> dict[str, Any]:
    """Those of a record that its summary has as well."""
    return {
        "generation_id": GenerationId(str(row["generation_id"])),
        "tenant_id": row["tenant_id"],
        "key_id": row["key_id"],
        "request_id": row["request_id"],
        "model": row["model"],
        "model_key": _model_key(row),
        "priority_class": PriorityClass(row["priority_class"]),
        "state": State(row["state"]),
        "attempt": row["attempt"],
        "charged_attempts": row["charged_attempts"],
        "session_id": row["session_id"],
        "cancel_cause": CancelCause(row["cancel_cause"]) if row["cancel_cause"] is not None else None,
        "created_at": row["created_at"],
        "queue_deadline_at": row["queue_deadline_at"],
        "deadline_at": row["deadline_at"],
        "started_at": row["started_at"],
        "finished_at": row["finished_at"],
        "finish_reason": FinishReason(row["finish_reason"]) if row["finish_reason"] is not None else None,
        "error_reason": row["error_reason"],
        "error_message": row["error_message"],
        "cached_prompt_tokens": row["cached_prompt_tokens"],
        "output_tokens": row["output_tokens"],
        "is_stored": row["is_stored"],
        "texts_deleted_at": row["texts_deleted_at"],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class OverdueRow:
    """What says when a live row is overdue."""

    generation_id: GenerationId
    state: State
    attempt: int
    deadline_at: datetime | None
    queue_deadline_at: datetime


def overdue(row: Row) -> OverdueRow:
    return OverdueRow(
        generation_id=GenerationId(str(row["generation_id"])),
        state=State(row["state"]),
        attempt=row["attempt"],
        deadline_at=row["deadline_at"],
        queue_deadline_at=row["queue_deadline_at"],
    )


def chunk(row: Row) -> Delta:
    return Delta(
        first=row["first_number"],
        token_ids=unpack_token_ids(row["token_ids"]),
        texts=unpack_texts(row["text"], row["text_ends"]),
        prev_chain=to_unsigned(row["prev_chain"]),
        chain=to_unsigned(row["chain"]),
        logprobs=unpack_logprobs(row["logprobs"]) if row["logprobs"] is not None else (),
    )


def chunk_end(row: Row) -> Cursor:
    return Cursor(sequence_number=row["last_number"], chain=to_unsigned(row["chain"]))


def attempt(row: Row) -> AttemptRecord:
    return AttemptRecord(
        generation_id=GenerationId(str(row["generation_id"])),
        attempt=row["attempt"],
        session_id=row["session_id"],
        worker_id=row["worker_id"],
        nonce=to_unsigned(row["nonce"]),
        granted_at=row["granted_at"],
        ended_at=row["ended_at"],
        outcome=AttemptOutcome(row["outcome"]) if row["outcome"] is not None else None,
        end_position=row["end_position"],
        is_charged=row["is_charged"],
    )


def session(row: Row) -> SessionRecord:
    return SessionRecord(
        session_id=row["session_id"],
        worker_id=row["worker_id"],
        address=row["address"],
        scheduler_id=row["scheduler_id"],
        owner_epoch=row["owner_epoch"],
        state=SessionState(row["state"]),
        model=row["model"],
        model_key=_model_key(row),
        context_length=row["context_length"],
        num_blocks=row["num_blocks"],
        block_size=row["block_size"],
        max_running=row["max_running"],
        kv_dtype=row["kv_dtype"],
        lease_expires_at=row["lease_expires_at"],
    )


def ledger_row(row: Row) -> LedgerRow:
    return LedgerRow(
        generation_id=GenerationId(str(row["generation_id"])),
        tenant_id=row["tenant_id"],
        key_id=row["key_id"],
        model=row["model"],
        priority_class=PriorityClass(row["priority_class"]),
        state=State(row["state"]),
        prompt_tokens=row["prompt_tokens"],
        cached_prompt_tokens=row["cached_prompt_tokens"],
        output_tokens=row["output_tokens"],
        finished_at=row["finished_at"],
    )


def dead_letter(row: Row) -> DeadLetter:
    return DeadLetter(
        generation_id=GenerationId(str(row["generation_id"])),
        tenant_id=row["tenant_id"],
        reason=row["reason"],
        message=row["message"],
        attempts=row["attempts"],
        worker_ids=tuple(row["worker_ids"]),
        created_at=row["created_at"],
    )
