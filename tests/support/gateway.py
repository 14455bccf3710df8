"""A gateway in process: real gRPC on both sides, stores in memory, and a scheduler whose worker is the test."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc

from gateway.app import GatewayApp
from gateway.config import GatewayConfig, StreamLimits, TokenizationLimits
from inference.internal.v1 import scheduler_pb2, scheduler_pb2_grpc
from inference.v1 import inference_pb2_grpc
from service_kit.api_key import mint_api_key
from service_kit.delta import Cursor, Delta, TokenLogprob, join, make_delta
from service_kit.errors import AlreadyExistsError, NotFoundError, SluiceError
from service_kit.grpc_client import open_channel
from service_kit.grpc_server import GrpcServer
from service_kit.ids import GatewayId, GenerationId, KeyId, RequestId, SchedulerId, SessionId, TenantId, new_session_id
from service_kit.sampling import FinishReason
from service_kit.sampling_codec import decode_sampling
from state_store.delta_log.memory import MemoryDeltaLog
from state_store.delta_log.port import AppendItem, AppendStatus, LogEnd, OpenItem, SealItem
from state_store.memory.store import MemoryStore
from state_store.model import (
    CancelCause,
    Finish,
    GenerationRecord,
    ModelKey,
    NewGeneration,
    NewSession,
    PriorityClass,
    State,
)
from state_store.ports import (
    AttemptRef,
    ChunkWrite,
    FinishKind,
    GrantKind,
    GrantRequest,
    RequeueKind,
    SubmitKind,
)
from state_store.quota.port import PermissiveQuota, QuotaPort
from tests.support.tenants import add_tenant, store_key
from tests.support.tiny_models import make_simulated_model

SCHEDULER_SERVICE = "inference.internal.v1.SchedulerService"
FAST = StreamLimits(
    silence=timedelta(milliseconds=50), tick=timedelta(milliseconds=10), watch_refresh=timedelta(milliseconds=100)
)


class MemoryScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Commits to the memory store and writes the log; the test says what the worker produces, step by step."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.log = MemoryDeltaLog(clock=lambda: datetime.now(UTC))
        self.submits: list[scheduler_pb2.SubmitRequest] = []
        self.refusal: SluiceError | None = None
        self.places: scheduler_pb2.QueuePlaces | None = None
        self._session: tuple[SessionId, int] | None = None
        self._output: dict[GenerationId, Cursor] = {}

    async def Submit(  # noqa: N802
        self, request: scheduler_pb2.SubmitRequest, context: Any
    ) -> scheduler_pb2.SubmitResponse:
        self.submits.append(request)
        if self.refusal is not None:
            raise self.refusal
        (result,) = await self.store.submit_many([decode_submit(request)])
        if result.kind is SubmitKind.CONFLICT:
            raise AlreadyExistsError("the request id stands for other arguments")
        return scheduler_pb2.SubmitResponse(
            generation_id=result.record.generation_id,
            created=result.kind is SubmitKind.CREATED,
            state=result.record.state.value,
            prompt_tokens=result.record.num_prompt_tokens,
            places=self.places,
        )

    async def Cancel(  # noqa: N802
        self, request: scheduler_pb2.CancelRequest, context: Any
    ) -> scheduler_pb2.CancelResponse:
        generation_id = GenerationId(request.generation_id)
        (record,) = await self.store.request_cancel_many([(generation_id, CancelCause.CLIENT)])
        if record is None or record.tenant_id != request.tenant_id:
            raise NotFoundError("no such generation")
        if not record.state.is_terminal:
            record = await self.finish(generation_id, State.CANCELLED)
        return scheduler_pb2.CancelResponse(state=record.state.value)

    async def AnnounceWorker(  # noqa: N802
        self, request: scheduler_pb2.AnnounceWorkerRequest, context: Any
    ) -> scheduler_pb2.AnnounceWorkerResponse:
        raise AssertionError("no worker here")

    async def record(self, generation_id: GenerationId) -> GenerationRecord:
        (record,) = await self.store.get_many([generation_id])
        assert record is not None
        return record

    async def grant(self, generation_id: GenerationId) -> None:
        """The next attempt: grant, then open the log at what is stored."""
        record = await self.record(generation_id)
        session_id, epoch = await self._live_session(record)
        request = GrantRequest(
            generation_id=generation_id,
            after_attempt=record.attempt,
            session_id=session_id,
            owner_epoch=epoch,
            nonce=1,
        )
        (result,) = await self.store.grant_many([request])
        assert result.kind is GrantKind.GRANTED
        (base,) = await self.store.stored_ends_many([generation_id])
        item = OpenItem(generation_id=generation_id, attempt=record.attempt + 1, base=base)
        (opened,) = await self.log.open_many([item])
        assert opened.is_opened
        self._output[generation_id] = opened.end

    async def _live_session(self, record: GenerationRecord) -> tuple[SessionId, int]:
        if self._session is None:
            session = NewSession(
                session_id=new_session_id(),
                worker_id="worker",
                address="nowhere",
                scheduler_id=SchedulerId("scheduler"),
                model=record.model,
                model_key=record.model_key,
                context_length=4096,
                num_blocks=1024,
                block_size=16,
                max_running=64,
            )
            opened = await self.store.open_session(session, lease=timedelta(hours=1))
            self._session = (session.session_id, opened.owner_epoch)
        return self._session

    async def produce(
        self,
        generation_id: GenerationId,
        token_ids: Sequence[int],
        texts: Sequence[str],
        logprobs: Sequence[TokenLogprob] = (),
    ) -> Delta:
        """Appends one delta behind what was produced so far."""
        record = await self.record(generation_id)
        delta = make_delta(after=self._output[generation_id], token_ids=token_ids, texts=texts, logprobs=logprobs)
        item = AppendItem(generation_id=generation_id, attempt=record.attempt, delta=delta)
        (result,) = await self.log.append_many([item])
        assert result.status is AppendStatus.OK
        self._output[generation_id] = delta.end
        return delta

    async def produce_each(self, generation_id: GenerationId, text: str) -> None:
        """One token and one delta per byte."""
        for byte in text.encode():
            await self.produce(generation_id, [byte], [chr(byte)])

    async def finish(
        self,
        generation_id: GenerationId,
        state: State = State.SUCCEEDED,
        *,
        reason: FinishReason | None = None,
        matched_stop: str | None = None,
        error_reason: str | None = None,
        is_told: bool = True,
    ) -> GenerationRecord:
        """Commits the end; `is_told` False dies before the log is closed."""
        record = await self.record(generation_id)
        (view,) = await self.log.read_many([(generation_id, 0)])
        finish = Finish(
            generation_id=generation_id,
            from_state=record.state,
            attempt=record.attempt,
            state=state,
            output=join(view.deltas),
            output_tokens=view.end.sequence_number,
            finish_reason=reason or (FinishReason.STOP if state is State.SUCCEEDED else None),
            matched_stop=matched_stop,
            error_reason=error_reason,
        )
        (result,) = await self.store.finish_many([finish])
        assert result.kind is FinishKind.FINISHED, result.kind
        assert result.record is not None
        if is_told:
            await self.close_log(result.record)
        return result.record

    async def store_and_lose_log(self, generation_id: GenerationId) -> None:
        """What is left when a generation's output was stored for its next attempt and the log's server lost all."""
        record = await self.record(generation_id)
        (view,) = await self.log.read_many([(generation_id, 0)])
        output = join(view.deltas)
        assert output is not None
        chunk = ChunkWrite(generation_id=generation_id, attempt=record.attempt, output=output)
        assert await self.store.store_chunks_many([chunk]) == [True]
        (requeued,) = await self.store.requeue_many([AttemptRef(generation_id=generation_id, attempt=record.attempt)])
        assert requeued.kind is RequeueKind.REQUEUED
        self.log.lose_all()

    async def close_log(self, record: GenerationRecord) -> None:
        end = LogEnd(
            state=record.state,
            output_tokens=record.output_tokens,
            prompt_tokens=record.num_prompt_tokens,
            cached_prompt_tokens=record.cached_prompt_tokens,
            finish_reason=record.finish_reason,
            matched_stop=record.matched_stop,
            error_reason=record.error_reason,
            error_message=record.error_message,
        )
        await self.log.seal_many([SealItem(generation_id=record.generation_id, attempt=record.attempt, terminal=end)])


def decode_submit(request: scheduler_pb2.SubmitRequest) -> NewGeneration:
    sampling = decode_sampling(request.sampling, field="sampling")
    return NewGeneration(
        generation_id=GenerationId(request.generation_id),
        tenant_id=TenantId(request.tenant_id),
        key_id=KeyId(request.key_id),
        request_id=RequestId(request.request_id),
        request_hash=request.request_hash,
        model=request.model,
        model_key=ModelKey(revision=request.model_revision, precision=request.precision),
        priority_class=PriorityClass.from_rank(request.priority),
        prompt_token_ids=tuple(request.prompt_token_ids),
        sampling=sampling if request.has_seed else replace(sampling, seed=7),
        grace=request.grace.ToTimedelta() if request.HasField("grace") else None,
        queue_timeout=request.queue_timeout.ToTimedelta(),
        deadline=request.deadline.ToTimedelta() if request.HasField("deadline") else None,
        traceparent=request.traceparent,
        is_stored=request.store if request.HasField("store") else True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayRig:
    """A running gateway, its scheduler, and a client with a valid key."""

    app: GatewayApp
    scheduler: MemoryScheduler
    channel: grpc.aio.Channel
    stub: Any
    key: str
    config: GatewayConfig

    @property
    def auth(self) -> tuple[tuple[str, str], ...]:
        return bearer(self.key)


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def add_key(
    store: MemoryStore,
    tenant: str,
    *,
    expires_at: datetime | None = None,
    max_class: PriorityClass = PriorityClass.INTERACTIVE,
) -> str:
    """A new tenant (or a known one) with a new key; returns the key's text."""
    text, presented = mint_api_key()
    await add_tenant(store, tenant, max_class=max_class)
    await store_key(store, tenant, presented, expires_at=expires_at)
    return text


@asynccontextmanager
async def running_gateway(
    models_dir: Path,
    *,
    scheduler: MemoryScheduler | None = None,
    limits: StreamLimits = FAST,
    extra_schedulers: Sequence[str] = (),
    num_scheduler_names: int = 1,
    quota: QuotaPort | None = None,
    tokenization: TokenizationLimits | None = None,
    drain: timedelta = timedelta(seconds=5),
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> AsyncIterator[GatewayRig]:
    """`models_dir` gets a simulated model, context 64. `extra_schedulers` are asked before the real
    one, which is configured `num_scheduler_names` times."""
    if not (models_dir / "simulated").exists():
        make_simulated_model(models_dir / "simulated", context_length=64)
    scheduler = scheduler or MemoryScheduler()
    scheduler_server = GrpcServer(
        listen="127.0.0.1:0",
        services={
            SCHEDULER_SERVICE: lambda server: scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(
                scheduler, server
            )
        },
    )
    scheduler_port = await scheduler_server.start()
    config = GatewayConfig(
        postgres_dsn="",
        redis_url="",
        listen="127.0.0.1:0",
        schedulers=(*extra_schedulers, *[f"127.0.0.1:{scheduler_port}"] * num_scheduler_names),
        models_dir=models_dir,
        streams=limits,
        tokenization=tokenization or TokenizationLimits(),
        drain=drain,
    )
    app = GatewayApp(
        config,
        gateway_id=GatewayId(f"gateway-{scheduler_port}"),
        generations=scheduler.store,
        sessions=scheduler.store,
        keys=scheduler.store,
        log=scheduler.log,
        quota=quota or PermissiveQuota(),
        now=now,
    )
    port = await app.start()
    channel = open_channel(f"127.0.0.1:{port}")
    try:
        yield GatewayRig(
            app=app,
            scheduler=scheduler,
            channel=channel,
            stub=inference_pb2_grpc.InferenceServiceStub(channel),
            key=await add_key(scheduler.store, "tenant"),
            config=replace(config, listen=f"127.0.0.1:{port}"),
        )
    finally:
        await channel.close(None)
        await app.stop()
        await scheduler_server.stop(timedelta(0))
