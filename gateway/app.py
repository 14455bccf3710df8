"""The running gateway: its parts wired, started in order, honest about its health, drained at the end."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

from gateway.admin import AdminServicer, AdminStore
from gateway.admission import Admission
from gateway.auth import Authenticator
from gateway.config import GatewayConfig
from gateway.model_registry import ModelRegistry
from gateway.prompt import PromptEncoder
from gateway.queue_room import QueueRooms
from gateway.records import RecordReader
from gateway.scheduler_client import SchedulerClient
from gateway.service import GatewayParts, InferenceServicer
from gateway.streaming.hub import StreamHub
from gateway.streaming.stream import StreamOpener
from gateway.submit import Submitter
from gateway.tokenization import TokenizationPool
from inference.v1 import admin_pb2_grpc, inference_pb2_grpc
from service_kit.crash_point import CrashPoints
from service_kit.errors import Reason, UnavailableError
from service_kit.grpc_server import GrpcServer
from service_kit.ids import GatewayId, GenerationId
from service_kit.logging import get_logger
from state_store.delta_log.port import DeltaLogReader
from state_store.ports import GenerationStore, SessionStore
from state_store.pulse import Pulse
from state_store.quota.port import QuotaPort

SERVICE_NAME = "inference.v1.InferenceService"
ADMIN_SERVICE_NAME = "inference.v1.AdminService"
_HEALTH_INTERVAL = timedelta(seconds=1)
_START_RETRY = timedelta(seconds=0.5)
_PROBE = GenerationId("00000000-0000-7000-8000-000000000000")
"""An id that no generation has."""
_LAST_WORDS = timedelta(seconds=2)
"""For statuses to reach the clients after their streams were ended."""

_log = get_logger()


class GatewayApp:
    """Owner of the process's parts. Not restartable; the adapters belong to the caller."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        gateway_id: GatewayId,
        generations: GenerationStore,
        sessions: SessionStore,
        keys: AdminStore,
        log: DeltaLogReader,
        quota: QuotaPort,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
        check_stores: Callable[[], Awaitable[None]] | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        """`check_stores` runs once, before serving; what it raises ends the start. `pulse` is the store's: without it new
        requests wait as long as the schedulers do."""
        self._config = config
        self._check_stores = check_stores
        self._sessions = sessions
        self._delta_log = log
        self.registry = ModelRegistry(config.models_dir)
        self._pool = TokenizationPool(config.tokenization)
        self.hub = StreamHub(gateway_id=gateway_id, log=log, store=generations, limits=config.streams, clock=clock)
        self._scheduler = SchedulerClient(config.schedulers, access=config.access)
        encoder = PromptEncoder(self._pool, max_prompt_bytes=config.tokenization.max_prompt_bytes)
        submitter = Submitter(scheduler=self._scheduler, crash_points=CrashPoints(config.crash_file), pulse=pulse)
        authenticator = Authenticator(keys, now=now, clock=clock)
        admin = AdminServicer(authenticator, keys, now=now)
        servicer = InferenceServicer(
            GatewayParts(
                authenticator=authenticator,
                registry=self.registry,
                encoder=encoder,
                admission=Admission(
                    registry=self.registry,
                    encoder=encoder,
                    submitter=submitter,
                    queue_rooms=QueueRooms(now=now),
                    quota=quota,
                    store=generations,
                ),
                hub=self.hub,
                scheduler=self._scheduler,
                records=RecordReader(store=generations, log=log),
                streams=StreamOpener(hub=self.hub, log=log, store=generations, limits=config.streams),
                generations=generations,
                sessions=sessions,
            )
        )
        self._server = GrpcServer(
            listen=config.listen,
            services={
                SERVICE_NAME: lambda server: inference_pb2_grpc.add_InferenceServiceServicer_to_server(
                    servicer, server
                ),
                ADMIN_SERVICE_NAME: lambda server: admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server),
            },
            tls=config.tls,
        )
        self._background: list[asyncio.Task[None]] = []

    async def start(self) -> int:
        """Listens (not serving), waits for store and log, then serves. Returns the port.

        The models are known before: a client that comes back early must not hear that its model does not exist.
        Raises TimeoutError when store and log do not come up within the start timeout.
        """
        await self.registry.rescan()
        port = await self._server.start()
        self._background.append(asyncio.create_task(self.hub.run(), name="hub"))
        async with asyncio.timeout(self._config.start_timeout.total_seconds()):
            await self._wait_for_stores()
            if self._check_stores is not None:
                await self._check_stores()
            await self.hub.wait_connected()
        await self._server.set_serving(is_serving=True)
        self._background.append(asyncio.create_task(self._run_health(), name="health"))
        rescan = self.registry.run(self._config.models_rescan)
        self._background.append(asyncio.create_task(rescan, name="models"))
        _log.info("gateway_serving", port=port, models=[model.manifest.model for model in self.registry.models()])
        return port

    async def _wait_for_stores(self) -> None:
        while True:
            trouble = await self._find_trouble()
            if trouble is None:
                return
            _log.info("gateway_waits", error=trouble)
            await asyncio.sleep(_START_RETRY.total_seconds())

    async def _find_trouble(self) -> str | None:
        """Why a new request would have no chance; None when store and log answer."""
        try:
            await self._sessions.list_sessions()
            await self._delta_log.read_many([(_PROBE, 0)])
        except Exception as error:  # noqa: BLE001 - a schema that is not there yet is no reason to die either
            return f"{type(error).__name__}: {error}"
        return None

    async def _run_health(self) -> None:
        """Serving means that a new request has a chance."""
        was_serving = True
        while True:
            await asyncio.sleep(_HEALTH_INTERVAL.total_seconds())
            trouble = await self._find_trouble()
            is_serving = trouble is None
            if is_serving != was_serving:
                _log.warning("gateway_health_changed", is_serving=is_serving, error=trouble)
                await self._server.set_serving(is_serving=is_serving)
            was_serving = is_serving

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set, or a background task dies; then drains."""
        stopping = asyncio.create_task(stop.wait(), name="stop")
        starting = asyncio.create_task(self.start(), name="start")
        try:
            await asyncio.wait([stopping, starting], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                await starting
                await asyncio.wait([stopping, *self._background], return_when=asyncio.FIRST_COMPLETED)
            for task in self._background:
                if task.done():
                    await task
        finally:
            stopping.cancel()
            starting.cancel()
            await self.stop()

    async def stop(self) -> None:
        """Not ready, no new work, running streams for the drain time, then UNAVAILABLE: the clients resume elsewhere."""
        error = UnavailableError("this gateway is shutting down", reason=Reason.DRAINING)
        self.hub.refuse_new(error)
        await self._server.set_serving(is_serving=False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain.total_seconds()):
                await self.hub.wait_idle()
        self.hub.close_all(error)
        await self._server.stop(_LAST_WORDS)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.hub.end_watching()
        await self._scheduler.close()
        self._pool.close()
        _log.info("gateway_stopped")
