"""How the scheduler's objects hang together; the composition root and the tests build it over their own stores."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from scheduler.admission import Admission
from scheduler.assignments import Assignments
from scheduler.cancel_hints import CancelHints, NoCancelHints
from scheduler.cancellation import Cancellation
from scheduler.config import SchedulerConfig
from scheduler.coordinator import Coordinator
from scheduler.dispatcher import Dispatcher
from scheduler.model_directory import ModelDirectory
from scheduler.output_charges import OutputCharges
from scheduler.queue.port import AdmissionQueue
from scheduler.quota_upkeep import QuotaReaper
from scheduler.reaper import Reaper
from scheduler.recovery import Recovery
from scheduler.service import SchedulerServicer
from scheduler.session_registry import SessionRegistry
from scheduler.surroundings import Surroundings
from scheduler.tenant_weights import TenantWeights
from scheduler.worker_session import WorkerSession
from service_kit.crash_point import CrashPoints
from service_kit.ids import SchedulerId
from state_store.delta_log.port import DeltaLogWriter
from state_store.model import NewSession
from state_store.ports import Store
from state_store.pulse import Pulse
from state_store.quota.port import PermissiveQuota, QuotaPort, QuotaUpkeep
from state_store.quota.records import QuotaRecords


def _now() -> datetime:
    return datetime.now(tz=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The scheduler's objects, wired."""

    servicer: SchedulerServicer
    cancellation: Cancellation
    recovery: Recovery
    coordinator: Coordinator
    dispatcher: Dispatcher
    registry: SessionRegistry
    reaper: Reaper
    admission: Admission
    quota_reaper: QuotaReaper | None
    models: ModelDirectory
    charges: OutputCharges


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """`monotonic_s` measures patience, `now` is compared with times in the log."""

    monotonic_s: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = _now


def build(
    config: SchedulerConfig,
    *,
    store: Store,
    log: DeltaLogWriter,
    queue: AdmissionQueue,
    hints: CancelHints | None = None,
    clocks: Clocks | None = None,
    quota: QuotaPort | None = None,
    upkeep: QuotaUpkeep | None = None,
    quota_records: QuotaRecords | None = None,
    pulse: Pulse | None = None,
) -> Parts:
    """Wires the scheduler over its stores. Without `hints` it is alone; without `quota` nothing is counted, and without
    `upkeep` and `quota_records` (of the store) the counts are kept true by others; `pulse` as for the admission."""
    clocks = clocks or Clocks()
    scheduler_id = SchedulerId(config.scheduler_id or f"scheduler-{secrets.token_hex(4)}")
    crash_points = CrashPoints(config.crash_file)
    quota = quota or PermissiveQuota()
    coordinator = Coordinator(store=store, log=log, quota=quota, crash_points=crash_points)
    assignments = Assignments(store=store, log=log)
    weights = TenantWeights(store=store, clock=clocks.monotonic_s)
    charges = OutputCharges(queue=queue, weights=weights)
    models = ModelDirectory(store=store, clock=clocks.monotonic_s)
    recovery = Recovery(
        store=store,
        log=log,
        queue=queue,
        weights=weights,
        coordinator=coordinator,
        crash_points=crash_points,
        now=clocks.now,
    )
    wake: list[Callable[[], None]] = []

    def on_room() -> None:
        for call in wake:
            call()

    surroundings = Surroundings(
        store=store,
        coordinator=coordinator,
        charges=charges,
        assignments=assignments,
        clock=clocks.monotonic_s,
        access=config.access,
        on_room=on_room,
        shares_prefixes=config.shares_prefixes,
    )

    def make_session(session: NewSession, owner_epoch: int) -> WorkerSession:
        return WorkerSession(session, owner_epoch=owner_epoch, surroundings=surroundings)

    registry = SessionRegistry(
        store=store, recovery=recovery, make_session=make_session, clock=clocks.monotonic_s, lease=config.lease
    )
    dispatcher = Dispatcher(
        store=store,
        queue=queue,
        assignments=assignments,
        registry=registry,
        crash_points=crash_points,
        clock=clocks.monotonic_s,
        now=clocks.now,
        shares_prefixes=config.shares_prefixes,
    )
    wake.append(dispatcher.wake)
    admission = Admission(
        store=store,
        queue=queue,
        models=models,
        weights=weights,
        quota=quota,
        crash_points=crash_points,
        on_queued=dispatcher.wake,
        pulse=pulse,
    )
    cancellation = Cancellation(store=store, registry=registry, recovery=recovery, hints=hints or NoCancelHints())
    quota_reaper = QuotaReaper(quota=quota, upkeep=upkeep, records=quota_records) if upkeep and quota_records else None
    reaper = Reaper(
        store=store,
        log=log,
        queue=queue,
        weights=weights,
        registry=registry,
        recovery=recovery,
        cancellation=cancellation,
        quota=quota_reaper,
        lease=config.lease,
        clock=clocks.monotonic_s,
        now=clocks.now,
    )
    servicer = SchedulerServicer(
        scheduler_id=scheduler_id,
        admission=admission,
        cancellation=cancellation,
        registry=registry,
    )
    return Parts(
        servicer=servicer,
        cancellation=cancellation,
        recovery=recovery,
        coordinator=coordinator,
        dispatcher=dispatcher,
        registry=registry,
        reaper=reaper,
        admission=admission,
        quota_reaper=quota_reaper,
        models=models,
        charges=charges,
    )
