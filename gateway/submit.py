"""From a validated request to a committed generation."""

from dataclasses import dataclass
from datetime import timedelta

from google.protobuf.duration_pb2 import Duration

from gateway.queue_room import Places
from gateway.quota import CallQuota
from gateway.scheduler_client import SchedulerClient
from gateway.validation import DeliveryTimes
from inference.internal.v1 import scheduler_pb2
from service_kit.crash_point import CrashPoints
from service_kit.errors import SluiceError
from service_kit.ids import GenerationId, RequestId
from service_kit.model_manifest import ModelManifest
from service_kit.sampling import SamplingParams
from service_kit.sampling_codec import encode_sampling
from service_kit.telemetry import tracer
from state_store.model import PriorityClass, State
from state_store.pulse import Pulse
from state_store.quota.port import QuotaCharge
from state_store.tenants import ApiKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request that is ready to be committed."""

    generation_id: GenerationId
    request_id: RequestId
    is_named: bool
    """Whether the client named the request id."""
    request_hash: bytes
    key: ApiKey
    manifest: ModelManifest
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    has_seed: bool
    priority_class: PriorityClass
    times: DeliveryTimes
    traceparent: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The generation that has the request id."""

    generation_id: GenerationId
    created: bool
    state: State
    prompt_tokens: int
    places: Places | None = None
    """None when this call committed nothing."""


class Submitter:
    """Reserves quota and submits. A reservation is leased: one that this process loses is given back by itself."""

    def __init__(
        self,
        *,
        scheduler: SchedulerClient,
        crash_points: CrashPoints | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        """`pulse` is the store's: while it is silent no scheduler is waited for, one after the other."""
        self._pulse = pulse
        self._crash_points = crash_points or CrashPoints()
        self._scheduler = scheduler

    async def submit(self, submission: Submission, quota: CallQuota) -> Committed:
        """Commits the generation, or finds the one that has its request id.

        Raises AlreadyExistsError, QuotaExceededError, UnavailableError, and what `CallQuota.reserve` raises; after
        UnavailableError it is not known whether the generation exists, and repeating the call with the same request id is
        safe.
        """
        charge = _charge_of(submission)
        with tracer().start_as_current_span("gateway.submit"):
            is_reserved = await quota.reserve(charge)
            self._crash_points.hit("quota.reserved")
            try:
                response = await self._send(encode_submit(submission))
            except SluiceError:
                # After UNAVAILABLE it is perhaps committed and bound: releasing only touches what is not bound.
                if is_reserved:
                    await quota.release(charge)
                raise
        # Not created, and yet its own: by a scheduler that died behind the commit, before this one was asked.
        if is_reserved and response.generation_id != submission.generation_id:
            await quota.release(charge)
        return Committed(
            generation_id=GenerationId(response.generation_id),
            created=response.created,
            state=State(response.state),
            prompt_tokens=response.prompt_tokens,
            places=_places_of(response),
        )

    async def _send(self, request: scheduler_pb2.SubmitRequest) -> scheduler_pb2.SubmitResponse:
        if self._pulse is None:
            return await self._scheduler.submit(request)
        return await self._pulse.while_answering(lambda: self._scheduler.submit(request))


def _charge_of(submission: Submission) -> QuotaCharge:
    return QuotaCharge(
        generation_id=submission.generation_id,
        tenant_id=submission.key.tenant.tenant_id,
        key_id=submission.key.key_id,
        prompt_tokens=len(submission.prompt_token_ids),
        max_output_tokens=submission.sampling.max_output_tokens,
    )


def _places_of(response: scheduler_pb2.SubmitResponse) -> Places | None:
    if not response.HasField("places"):
        return None
    places = response.places
    return Places(queue=places.queue, tenant=places.tenant, retry_after=places.retry_after.ToTimedelta())


def encode_submit(submission: Submission) -> scheduler_pb2.SubmitRequest:
    manifest, times = submission.manifest, submission.times
    return scheduler_pb2.SubmitRequest(
        generation_id=submission.generation_id,
        tenant_id=submission.key.tenant.tenant_id,
        key_id=submission.key.key_id,
        request_id=submission.request_id,
        request_hash=submission.request_hash,
        model=manifest.model,
        model_revision=manifest.revision,
        precision=manifest.precision,
        priority=submission.priority_class.rank,
        prompt_token_ids=submission.prompt_token_ids,
        sampling=encode_sampling(submission.sampling),
        has_seed=submission.has_seed,
        grace=_duration(times.grace),
        queue_timeout=_duration(times.queue_timeout),
        deadline=_duration(times.deadline),
        traceparent=submission.traceparent,
        store=times.is_stored,
        is_new=not submission.is_named,
    )


def _duration(value: timedelta | None) -> Duration | None:
    if value is None:
        return None
    duration = Duration()
    duration.FromTimedelta(value)
    return duration
