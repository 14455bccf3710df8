"""A gateway, a scheduler and a scripted worker over one real server, and what the model of their requests knows.

Calls go over gRPC. The record and the log are memory twins; loops are turned by hand, and one clock, which moves only between
two steps, is everybody's.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gateway.app import GatewayApp
from gateway.config import GatewayConfig
from inference.v1 import inference_pb2_grpc
from scheduler.queue.memory import MemoryAdmissionQueue
from scheduler.queue.redis_queue import RedisAdmissionQueue
from service_kit.api_key import mint_api_key
from service_kit.grpc_client import open_channel
from service_kit.ids import GatewayId, GenerationId, TenantId
from service_kit.model_manifest import ModelManifest
from state_store.delta_log.connection import connect_redis
from state_store.delta_log.memory import MemoryDeltaLog
from state_store.memory.store import MemoryStore
from state_store.model import ModelKey
from state_store.quota.redis_quota import RedisQuota
from state_store.tenants import UNLIMITED, ApiKey, QuotaLimits
from tests.support.delta_logs import database_url
from tests.support.live_requests import Request
from tests.support.quota_keys import QuotaBook
from tests.support.scheduler_rig import ManualClock, SchedulerRig, Stores, running_scheduler
from tests.support.scripted_worker import ScriptedWorker
from tests.support.tenants import add_tenant, store_key
from tests.support.tiny_models import make_simulated_model
from tests.support.twinned_queue import TwinnedQueue

DATABASE = 9
START = datetime(2030, 1, 31, 23, 58, 45, 250_000, tzinfo=UTC)
"""Another day, and another month, begins on the way."""
WEIGHTS = {"a": 1.0, "b": 3.0, "c": 1.0}
LIMITS = {
    "a": UNLIMITED,
    "b": QuotaLimits(requests_per_minute=90, tokens_per_minute=6_000, tokens_per_day=100_000),
    "c": QuotaLimits(max_concurrent=16, tokens_per_month=100_000),
}
KEY_LIMITS = {"0": UNLIMITED, "1": QuotaLimits(max_concurrent=9)}


@dataclass(slots=True)
class StandingClock(ManualClock):
    """The wall clock goes on; patience with sessions does not end, because their workers speak only when told to. It is
    `patience_s` that passes for them."""

    patience_s: float = 0.0

    def __call__(self) -> float:
        return self.patience_s


@dataclass(kw_only=True)
class World:
    """All parts, and what the model knows: the live requests by id, and the charges."""

    clock: StandingClock
    random: random.Random
    store: MemoryStore
    queue: TwinnedQueue
    quota: RedisQuota
    redis: Any
    scheduler: SchedulerRig
    stub: Any
    manifest: ModelManifest
    keys: dict[str, tuple[str, ApiKey]]
    """By the key's id: its text, and the key."""
    worker: ScriptedWorker
    log: MemoryDeltaLog
    live: dict[GenerationId, Request] = field(default_factory=dict)
    calls: defaultdict[TenantId, list[Any]] = field(default_factory=lambda: defaultdict(list))
    """What each tenant has asked for, and been given."""
    book: QuotaBook = field(default_factory=QuotaBook)

    @property
    def model_key(self) -> ModelKey:
        return ModelKey(revision=self.manifest.revision, precision=self.manifest.precision)

    def now(self) -> datetime:
        return self.clock.now()

    def queued(self) -> list[Request]:
        return [request for request in self.live.values() if not request.is_running]

    def running(self) -> list[Request]:
        return [request for request in self.live.values() if request.is_running]

    def end(self, request: Request) -> None:
        """What it cost is its prompt and what was said."""
        del self.live[request.generation_id]
        self.book.settle(request.generation_id, request.entry.prompt_tokens + request.said, self.now())

    async def lose_worker(self, untried: list[tuple[str, int]]) -> None:
        """Its engine dies, and then the process; another one comes in its place."""
        ((session, lost),) = self.scheduler.parts.registry._sessions.values()
        self.worker.lose_engine(untried=untried)
        await until(lambda: session.untried is not None)
        await self.worker.stop()
        async with asyncio.timeout(20):
            while not lost.done():
                self.clock.patience_s += 1.0
                await asyncio.sleep(0.001)
        self.clock.patience_s = 0.0
        self.worker = await _start_worker(self.manifest, self.scheduler)


async def until(condition: Any) -> None:
    """Without the pause of a poll where the answer is nearly there."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.0005)


@asynccontextmanager
async def running_world(server_url: str, models_dir: Path, *, seed: int) -> AsyncIterator[World]:
    """In an emptied database."""
    clock = StandingClock(started=START)
    manifest = make_simulated_model(models_dir / "simulated", context_length=256)
    redis = connect_redis(database_url(server_url, DATABASE))
    await redis.flushdb()
    queue = TwinnedQueue(RedisAdmissionQueue(redis, clock=clock.now), MemoryAdmissionQueue(clock.now))
    quota = RedisQuota(redis, clock=clock.now)
    store, log = MemoryStore(clock=clock.now), MemoryDeltaLog(clock.now)
    stores = Stores(store=store, log=log, queue=queue, redis=redis, clock=clock)
    async with running_scheduler(stores, clock=clock, quota=quota) as scheduler:
        assert scheduler.parts.quota_reaper is not None
        await scheduler.parts.quota_reaper.run_once()
        worker = await _start_worker(manifest, scheduler)
        async with _running_gateway(models_dir, scheduler, store, log, quota) as stub:
            world = World(
                clock=clock,
                random=random.Random(seed),
                store=store,
                queue=queue,
                quota=quota,
                redis=redis,
                scheduler=scheduler,
                stub=stub,
                manifest=manifest,
                keys=await _make_keys(store),
                worker=worker,
                log=log,
            )
            yield world
            await world.worker.stop()
    await redis.aclose()


@asynccontextmanager
async def _running_gateway(
    models_dir: Path, scheduler: SchedulerRig, store: MemoryStore, log: MemoryDeltaLog, quota: RedisQuota
) -> AsyncIterator[Any]:
    config = GatewayConfig(
        postgres_dsn="",
        redis_url="",
        listen="127.0.0.1:0",
        schedulers=(scheduler.address,),
        models_dir=models_dir,
        drain=timedelta(0),
    )
    app = GatewayApp(
        config,
        gateway_id=GatewayId("gateway"),
        generations=store,
        sessions=store,
        keys=store,
        log=log,
        quota=quota,
        now=scheduler.stores.clock.now,
    )
    channel = open_channel(f"127.0.0.1:{await app.start()}")
    try:
        yield inference_pb2_grpc.InferenceServiceStub(channel)
    finally:
        await channel.close(None)
        await app.stop()


async def _start_worker(manifest: ModelManifest, scheduler: SchedulerRig) -> ScriptedWorker:
    """Small: some prompts do not fit beside the others."""
    worker = ScriptedWorker(revision=manifest.revision)
    sizes = {"model": manifest.model, "precision": manifest.precision, "context_length": 256}
    for name, value in (sizes | {"num_blocks": 24, "max_running": 4}).items():
        setattr(worker.capabilities, name, value)
    worker.load = type(worker.load)(num_free_blocks=24, num_blocks=24, block_size=16)
    await worker.start()
    await worker.announce(scheduler.address)
    await until(lambda: bool(scheduler.parts.registry.ready()))
    return worker


async def _make_keys(store: MemoryStore) -> dict[str, tuple[str, ApiKey]]:
    keys: dict[str, tuple[str, ApiKey]] = {}
    for tenant, limits in LIMITS.items():
        await add_tenant(store, tenant, weight=WEIGHTS[tenant], limits=limits)
        for name, key_limits in KEY_LIMITS.items():
            text, presented = mint_api_key()
            key = await store_key(store, tenant, presented, key_id=f"{tenant}-{name}", limits=key_limits)
            keys[key.key_id] = (text, key)
    return keys
