"""A scheduler inside the test process, over any stores: loops are turned by hand, patience is a number."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import cast

from redis.asyncio import Redis

from inference.internal.v1 import scheduler_pb2_grpc
from scheduler.config import SchedulerConfig
from scheduler.queue.memory import MemoryAdmissionQueue
from scheduler.queue.port import AdmissionQueue
from scheduler.redis_cancel_hints import RedisCancelHints
from scheduler.wiring import Clocks, Parts, build
from service_kit.grpc_server import GrpcServer
from service_kit.ids import GenerationId, KeyId, RequestId, SchedulerId, TenantId, new_generation_id, new_session_id
from service_kit.internal_access import InternalAccess
from service_kit.logging import LogFormat
from service_kit.sampling import SamplingParams
from state_store.delta_log.memory import MemoryDeltaLog
from state_store.delta_log.port import DeltaLogReader, DeltaLogWriter
from state_store.model import GenerationRecord, ModelKey, NewGeneration, PriorityClass, SessionRecord, SessionState
from state_store.ports import Store
from state_store.quota.memory import MemoryQuota
from state_store.quota.records import QuotaRecords
from state_store.quota.redis_quota import RedisQuota

MODEL_KEY = ModelKey(revision="r1", precision="fp32")
TENANT = TenantId("tenant-a")


class Log(DeltaLogWriter, DeltaLogReader):
    """Both halves of a delta log."""


@dataclass(slots=True)
class ManualClock:
    """Seconds that pass when a test says so."""

    seconds: float = 0.0
    started: datetime = field(default_factory=lambda: datetime.now(tz=UTC))

    def __call__(self) -> float:
        return self.seconds

    def now(self) -> datetime:
        return self.started + timedelta(seconds=self.seconds)

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


@dataclass(slots=True, kw_only=True)
class Stores:
    """`redis` is None for the memory twins. `clock` is the one that the queue goes by, if it was given it."""

    store: Store
    log: Log
    queue: AdmissionQueue
    redis: Redis | None
    clock: ManualClock = field(default_factory=ManualClock)

    async def lose_log_and_queue(self) -> None:
        """What FLUSHALL does."""
        if self.redis is not None:
            await self.redis.flushdb()
        else:
            cast("MemoryDeltaLog", self.log).lose_all()
            cast("MemoryAdmissionQueue", self.queue).lose_all()


@dataclass(slots=True, kw_only=True)
class SchedulerRig:
    """`parts` are the scheduler's objects, `address` its gRPC server."""

    parts: Parts
    stores: Stores
    clock: ManualClock
    address: str

    async def submit(self, generation: NewGeneration | None = None) -> GenerationRecord:
        """As if a worker of the model had just been there."""
        generation = generation or make_generation()
        self.parts.models.note(make_session_record(generation.model_key))
        result = await self.parts.admission.submit(generation, has_seed=True)
        return result.record

    async def dispatch(self) -> bool:
        return await self.parts.dispatcher.run_once()

    async def record(self, generation_id: str) -> GenerationRecord:
        found = (await self.stores.store.get_many([GenerationId(generation_id)]))[0]
        assert found is not None
        return found


def make_config(**changes: object) -> SchedulerConfig:
    values: dict[str, object] = {
        "listen": "127.0.0.1:0",
        "scheduler_id": None,
        "postgres_dsn": "",
        "redis_url": "",
        "access": InternalAccess(),
        "lease": timedelta(seconds=5),
        "drain": timedelta(0),
        "trace_dir": None,
        "otlp_endpoint": None,
        "log_level": "INFO",
        "log_format": LogFormat.JSON,
        "crash_file": None,
    }
    return SchedulerConfig(**(values | changes))  # type: ignore[arg-type]


@asynccontextmanager
async def running_scheduler(
    stores: Stores,
    *,
    crash_file: Path | None = None,
    shares_prefixes: bool = False,
    clock: ManualClock | None = None,
    internal_token: str | None = None,
    quota: MemoryQuota | RedisQuota | None = None,
) -> AsyncIterator[SchedulerRig]:
    """A scheduler that serves gRPC; its loops do not run by themselves. `internal_token` is what it says to workers; without
    `quota` nothing is counted."""
    clock = clock or ManualClock()
    parts = build(
        make_config(
            crash_file=crash_file, shares_prefixes=shares_prefixes, access=InternalAccess(token=internal_token)
        ),
        store=stores.store,
        log=stores.log,
        queue=stores.queue,
        hints=RedisCancelHints(stores.redis) if stores.redis is not None else None,
        clocks=Clocks(monotonic_s=clock, now=clock.now),
        quota=quota,
        upkeep=quota,
        quota_records=cast("QuotaRecords", stores.store),
    )
    await parts.reaper.rebuild_queue()
    register = partial(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, parts.servicer)
    server = GrpcServer(listen="127.0.0.1:0", services={"inference.internal.v1.SchedulerService": register})
    port = await server.start()
    following = asyncio.create_task(parts.cancellation.follow_hints())
    try:
        yield SchedulerRig(parts=parts, stores=stores, clock=clock, address=f"127.0.0.1:{port}")
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await server.stop(timedelta(0))
        await parts.registry.stop()


def make_session_record(model_key: ModelKey = MODEL_KEY) -> SessionRecord:
    """A live session with room for everything."""
    return SessionRecord(
        session_id=new_session_id(),
        worker_id="worker",
        address="127.0.0.1:1",
        scheduler_id=SchedulerId("scheduler"),
        owner_epoch=1,
        state=SessionState.LIVE,
        model="scripted-model",
        model_key=model_key,
        context_length=1 << 20,
        num_blocks=1 << 16,
        block_size=16,
        max_running=16,
        kv_dtype="float32",
        lease_expires_at=datetime.now(tz=UTC),
    )


def make_generation(
    *,
    generation_id: GenerationId | None = None,
    request_id: str | None = None,
    request_hash: bytes = b"h" * 32,
    max_output_tokens: int = 100,
    prompt_token_ids: tuple[int, ...] = (1, 2, 3),
    priority_class: PriorityClass = PriorityClass.STANDARD,
    grace: timedelta | None = None,
    queue_timeout: timedelta = timedelta(minutes=10),
    deadline: timedelta | None = None,
    tenant_id: TenantId = TENANT,
) -> NewGeneration:
    """A valid generation; what a test does not name is of no importance to it."""
    generation_id = generation_id or new_generation_id()
    return NewGeneration(
        generation_id=generation_id,
        tenant_id=tenant_id,
        key_id=KeyId("key-a"),
        request_id=RequestId(request_id or f"request-{generation_id}"),
        request_hash=request_hash,
        model="scripted-model",
        model_key=MODEL_KEY,
        priority_class=priority_class,
        prompt_token_ids=prompt_token_ids,
        sampling=SamplingParams(max_output_tokens=max_output_tokens, temperature=0.0),
        grace=grace,
        queue_timeout=queue_timeout,
        deadline=deadline,
        traceparent="",
    )
