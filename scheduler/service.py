"""The scheduler's servicer: decode, call, encode. Health, errors and traces come from service_kit."""

from typing import Any

from inference.internal.v1 import scheduler_pb2, scheduler_pb2_grpc
from scheduler.admission import Admission, Submitted
from scheduler.cancellation import Cancellation
from scheduler.codec import decode_announcement, decode_submit
from scheduler.session_registry import SessionRegistry
from service_kit.ids import GenerationId, SchedulerId, TenantId
from service_kit.telemetry import tracer
from state_store.ports import SubmitKind


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Serves gateways and workers."""

    def __init__(
        self,
        *,
        scheduler_id: SchedulerId,
        admission: Admission,
        cancellation: Cancellation,
        registry: SessionRegistry,
    ) -> None:
        self._scheduler_id = scheduler_id
        self._admission = admission
        self._cancellation = cancellation
        self._registry = registry

    async def Submit(  # noqa: N802
        self, request: scheduler_pb2.SubmitRequest, context: Any
    ) -> scheduler_pb2.SubmitResponse:
        del context
        with tracer().start_as_current_span(
            "scheduler.submit", attributes={"generation_id": request.generation_id, "model": request.model}
        ):
            submitted = await self._admission.submit(
                decode_submit(request), has_seed=request.has_seed, is_new=request.is_new
            )
        return _encode_submitted(submitted)

    async def Cancel(  # noqa: N802
        self, request: scheduler_pb2.CancelRequest, context: Any
    ) -> scheduler_pb2.CancelResponse:
        del context
        state = await self._cancellation.cancel(TenantId(request.tenant_id), GenerationId(request.generation_id))
        return scheduler_pb2.CancelResponse(state=state)

    async def AnnounceWorker(  # noqa: N802
        self, request: scheduler_pb2.AnnounceWorkerRequest, context: Any
    ) -> scheduler_pb2.AnnounceWorkerResponse:
        del context
        owner_epoch = await self._registry.announce(decode_announcement(request, scheduler_id=self._scheduler_id))
        return scheduler_pb2.AnnounceWorkerResponse(scheduler_id=self._scheduler_id, owner_epoch=owner_epoch)


def _encode_submitted(submitted: Submitted) -> scheduler_pb2.SubmitResponse:
    response = scheduler_pb2.SubmitResponse(
        generation_id=submitted.record.generation_id,
        created=submitted.kind is SubmitKind.CREATED,
        state=submitted.record.state,
        prompt_tokens=submitted.record.num_prompt_tokens,
    )
    room = submitted.room
    if room is not None and response.created:
        response.places.queue = room.places.queue
        response.places.tenant = room.places.tenant
        response.places.retry_after.FromTimedelta(room.retry_after)
    return response
