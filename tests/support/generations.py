"""Builders of generations, sessions and outputs, and the steps that tests of the stores repeat."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from service_kit.delta import Cursor, Delta, TokenLogprob, make_delta
from service_kit.ids import KeyId, RequestId, SchedulerId, SessionId, TenantId, new_generation_id, new_session_id
from service_kit.sampling import FinishReason, SamplingParams
from state_store.model import Finish, GenerationRecord, ModelKey, NewGeneration, NewSession, PriorityClass, State
from state_store.ports import AttemptRef, GenerationStore, GrantKind, GrantRequest, SessionStore, SubmitKind
from state_store.tenant_store import TenantStore, UsageStore

NOW = datetime.now(UTC).replace(microsecond=0)
LEASE = timedelta(seconds=5)
TENANT = TenantId("tenant-a")
MODEL_KEY = ModelKey(revision="revision-1", precision="fp32")


class Store(GenerationStore, SessionStore, TenantStore, UsageStore, Protocol):
    """What both adapters are."""


def new_generation(**fields: Any) -> NewGeneration:
    generation_id = new_generation_id()
    default = NewGeneration(
        generation_id=generation_id,
        tenant_id=TENANT,
        key_id=KeyId("key-a"),
        request_id=RequestId(f"request-{generation_id}"),
        request_hash=b"\x00hash",
        model="tiny",
        model_key=MODEL_KEY,
        priority_class=PriorityClass.STANDARD,
        prompt_token_ids=(1, 2, 4_294_967_295),
        sampling=SamplingParams(max_output_tokens=8, temperature=0.7, seed=(1 << 63) - 1, stop=("é\n",)),
        grace=timedelta(seconds=30),
        queue_timeout=timedelta(seconds=60),
        deadline=timedelta(seconds=600),
        traceparent="00-trace",
    )
    return replace(default, **fields)


def new_session(**fields: Any) -> NewSession:
    default = NewSession(
        session_id=new_session_id(),
        worker_id="worker-1",
        address="127.0.0.1:1",
        scheduler_id=SchedulerId("scheduler-1"),
        model="tiny",
        model_key=MODEL_KEY,
        context_length=2048,
        num_blocks=100,
        block_size=16,
        max_running=8,
    )
    return replace(default, **fields)


def logprob_of(token_id: int) -> TokenLogprob:
    """A value and alternatives that no other token has; exact in 32 bits."""
    return TokenLogprob(-token_id / 64, ((token_id, -token_id / 64), (token_id + 1, -token_id / 8)))


def output(length: int, *, after: Cursor = Cursor(), base: int = 100, has_logprobs: bool = False) -> Delta:
    """`length` tokens; one of them has no text and one is NUL."""
    start = after.sequence_number
    token_ids = [base + start + offset for offset in range(length)]
    texts = [
        "\x00" if position == 1 else "" if position == 2 else f"é{position}"
        for position in range(start, start + length)
    ]
    return make_delta(
        after=after,
        token_ids=token_ids,
        texts=texts,
        logprobs=map(logprob_of, token_ids) if has_logprobs else (),
    )


def finish_of(record: GenerationRecord, **fields: Any) -> Finish:
    """A success without output, from where the record stands."""
    default = Finish(
        generation_id=record.generation_id,
        from_state=record.state,
        attempt=record.attempt,
        state=State.SUCCEEDED,
        output=None,
        output_tokens=0,
        finish_reason=FinishReason.STOP,
    )
    return replace(default, **fields)


def end_of_queued(record: GenerationRecord, **fields: Any) -> Finish:
    return finish_of(record, **{"state": State.CANCELLED, "finish_reason": None, **fields})


async def submitted(store: Store, **fields: Any) -> GenerationRecord:
    [result] = await store.submit_many([new_generation(**fields)], now=NOW)
    assert result.kind is SubmitKind.CREATED
    return result.record


async def opened(store: Store, **fields: Any) -> SessionId:
    session = new_session(**fields)
    await store.open_session(session, lease=LEASE, now=NOW)
    return session.session_id


def grant_request(record: GenerationRecord, session_id: SessionId, **fields: Any) -> GrantRequest:
    default = GrantRequest(
        generation_id=record.generation_id,
        after_attempt=record.attempt,
        session_id=session_id,
        owner_epoch=1,
        nonce=(1 << 64) - 1,
    )
    return replace(default, **fields)


async def granted(store: Store, record: GenerationRecord, session_id: SessionId, **fields: Any) -> GenerationRecord:
    [result] = await store.grant_many([grant_request(record, session_id, **fields)], now=NOW)
    assert result.kind is GrantKind.GRANTED
    assert result.record is not None
    return result.record


async def running(store: Store, **fields: Any) -> GenerationRecord:
    """A generation in its first attempt on a session of its own."""
    return await granted(store, await submitted(store, **fields), await opened(store))


async def requeued(store: Store, record: GenerationRecord) -> GenerationRecord:
    [result] = await store.requeue_many([AttemptRef(generation_id=record.generation_id, attempt=record.attempt)])
    assert result.record is not None
    return result.record


async def state_of(store: Store, record: GenerationRecord) -> GenerationRecord:
    [found] = await store.get_many([record.generation_id])
    assert found is not None
    return found
