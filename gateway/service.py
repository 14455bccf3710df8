"""The public servicer: decode, call, encode. Errors are raised; the server's interceptor makes statuses of them."""

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from opentelemetry import trace

from gateway.admission import Admission, NewRequest
from gateway.auth import Authenticator
from gateway.codec import (
    add_output,
    encode_model,
    encode_piece,
    encode_record,
    encode_state,
    end_error,
    is_worth_sending,
)
from gateway.model_registry import ModelRegistry
from gateway.page_token import decode_page_token, encode_page_token
from gateway.prompt import PromptEncoder
from gateway.quota import Metadata
from gateway.records import RecordReader
from gateway.scheduler_client import SchedulerClient
from gateway.streaming.hub import StreamHub
from gateway.streaming.stream import StreamOpener
from gateway.submit import Committed
from gateway.validation import (
    GRACE_AFTER_GENERATE,
    parse_cursor,
    parse_page_size,
    parse_states,
)
from inference.internal.v1 import scheduler_pb2
from inference.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from service_kit.delta import Cursor
from service_kit.ids import GenerationId
from service_kit.telemetry import tracer
from state_store.model import GenerationRecord, SessionState, State
from state_store.ports import GenerationStore, SessionStore
from state_store.tenants import ApiKey


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayParts:
    """What the servicer is made of."""

    authenticator: Authenticator
    registry: ModelRegistry
    encoder: PromptEncoder
    admission: Admission
    hub: StreamHub
    scheduler: SchedulerClient
    records: RecordReader
    streams: StreamOpener
    generations: GenerationStore
    sessions: SessionStore


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Stateless; every call authenticates first."""

    def __init__(self, parts: GatewayParts) -> None:
        self._parts = parts

    async def _authenticate(self, context: Any) -> ApiKey:
        return await self._parts.authenticator.authenticate_call(context)

    async def Generate(  # noqa: N802 - named by the proto
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        key = await self._authenticate(context)
        cursor = parse_cursor(request.cursor)
        new = self._parts.admission.mint(request.request_id, cursor=cursor)
        quota = await self._parts.admission.look(new, key, context.set_trailing_metadata)
        with self._parts.hub.hold(), _span("gateway.generate", new) as span:
            await _send_ids(context, new.generation_id, new.request_id, quota.metadata)
            committed = await self._parts.admission.admit(
                new,
                request.spec,
                request.delivery,
                key=key,
                quota=quota,
                default_grace=GRACE_AFTER_GENERATE,
                span=span,
            )
            span.set_attribute("generation_id", committed.generation_id)
            yield inference_pb2.GenerateResponse(accepted=_accepted(committed, new.request_id))
            token_bytes: Sequence[bytes] = ()
            if request.spec.sampling.HasField("logprobs"):
                # Of the revision that the generation is pinned to: the call may have attached to an older one.
                (record,) = await self._parts.generations.get_many([committed.generation_id])
                token_bytes = self._token_bytes(record)
            async with aclosing(self._deltas(committed.generation_id, cursor, span, token_bytes)) as deltas:
                async for delta in deltas:
                    yield inference_pb2.GenerateResponse(delta=delta)

    async def CreateGeneration(  # noqa: N802
        self, request: inference_pb2.CreateGenerationRequest, context: Any
    ) -> inference_pb2.CreateGenerationResponse:
        key = await self._authenticate(context)
        new = self._parts.admission.mint(request.request_id, cursor=Cursor())
        quota = await self._parts.admission.look(new, key, context.set_trailing_metadata)
        with self._parts.hub.hold(), _span("gateway.create", new) as span:
            await _send_ids(context, new.generation_id, new.request_id, quota.metadata)
            committed = await self._parts.admission.admit(
                new, request.spec, request.delivery, key=key, quota=quota, default_grace=None, span=span
            )
        return inference_pb2.CreateGenerationResponse(accepted=_accepted(committed, new.request_id))

    async def StreamGeneration(  # noqa: N802
        self, request: inference_pb2.StreamGenerationRequest, context: Any
    ) -> AsyncGenerator[inference_pb2.StreamGenerationResponse, None]:
        key = await self._authenticate(context)
        cursor = parse_cursor(request.cursor)
        with self._parts.hub.hold():
            record = await self._parts.records.find(key.tenant.tenant_id, request.generation)
            await _send_ids(context, record.generation_id, record.request_id)
            yield inference_pb2.StreamGenerationResponse(accepted=_accepted_again(record))
            span = trace.get_current_span()
            token_bytes = self._token_bytes(record)
            async with aclosing(self._deltas(record.generation_id, cursor, span, token_bytes)) as deltas:
                async for delta in deltas:
                    yield inference_pb2.StreamGenerationResponse(delta=delta)

    def _token_bytes(self, record: GenerationRecord | None) -> Sequence[bytes]:
        """By token id, for a generation whose log probabilities are shown."""
        if record is None or record.sampling.logprobs is None:
            return ()
        return self._parts.registry.token_bytes(record.model, record.model_key.revision)

    async def _deltas(
        self, generation_id: GenerationId, cursor: Cursor, parent: trace.Span, token_bytes: Sequence[bytes]
    ) -> AsyncGenerator[types_pb2.Delta, None]:
        """Messages behind the cursor; then returns, or raises the error that the generation ended with."""
        span = tracer().start_span(
            "gateway.stream",
            context=trace.set_span_in_context(parent),
            attributes={"generation_id": generation_id, "cursor": cursor.sequence_number},
        )
        last = cursor.sequence_number
        try:
            async with aclosing(self._parts.streams.stream(generation_id, cursor)) as pieces:
                async for piece in pieces:
                    if piece.delta is not None and last == cursor.sequence_number:
                        span.add_event("first_delta", timestamp=time.time_ns())
                    last = piece.cursor.sequence_number
                    if is_worth_sending(piece):
                        yield encode_piece(piece, token_bytes)
                    error = end_error(piece.end) if piece.end is not None else None
                    if error is not None:
                        raise error
        finally:
            span.set_attribute("last_sequence_number", last)
            span.end()

    async def GetGeneration(  # noqa: N802
        self, request: inference_pb2.GetGenerationRequest, context: Any
    ) -> inference_pb2.GetGenerationResponse:
        key = await self._authenticate(context)
        record = await self._parts.records.find(key.tenant.tenant_id, request.generation)
        found = await self._parts.records.with_output(record)
        last = found.output.last if found.output is not None else 0
        generation = encode_record(found.record, output_tokens=last)
        add_output(generation, found.output, self._token_bytes(found.record))
        return inference_pb2.GetGenerationResponse(generation=generation)

    async def ListGenerations(  # noqa: N802
        self, request: inference_pb2.ListGenerationsRequest, context: Any
    ) -> inference_pb2.ListGenerationsResponse:
        key = await self._authenticate(context)
        page_size = parse_page_size(request.page_size)
        states = parse_states(list(request.states))
        before = decode_page_token(request.page_token, states)
        records = await self._parts.generations.list_page(
            key.tenant.tenant_id, states=states, before=before, limit=page_size + 1
        )
        page = records[:page_size]
        has_more = len(records) > page_size
        return inference_pb2.ListGenerationsResponse(
            generations=[encode_record(record) for record in page],
            next_page_token=encode_page_token(page[-1].generation_id, states) if has_more else "",
        )

    async def CancelGeneration(  # noqa: N802
        self, request: inference_pb2.CancelGenerationRequest, context: Any
    ) -> inference_pb2.CancelGenerationResponse:
        key = await self._authenticate(context)
        record = await self._parts.records.find(key.tenant.tenant_id, request.generation)
        state = record.state
        if not state.is_terminal:
            response = await self._parts.scheduler.cancel(
                scheduler_pb2.CancelRequest(tenant_id=record.tenant_id, generation_id=record.generation_id)
            )
            state = State(response.state)
        return inference_pb2.CancelGenerationResponse(state=encode_state(state), generation_id=record.generation_id)

    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        del request
        key = await self._authenticate(context)
        live = [
            (session.model_key.revision, session.model_key.precision)
            for session in await self._parts.sessions.list_sessions()
            if session.state is SessionState.LIVE
        ]
        models = [
            encode_model(model, workers=live.count((model.manifest.revision, model.manifest.precision)))
            for model in self._parts.registry.models_of(key.tenant)
        ]
        return inference_pb2.ListModelsResponse(models=models)

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: Any
    ) -> inference_pb2.TokenizeResponse:
        key = await self._authenticate(context)
        model = self._parts.registry.get(request.model, key.tenant)
        token_ids = await self._parts.encoder.encode_text(request.WhichOneof("input"), request, model)
        return inference_pb2.TokenizeResponse(token_ids=token_ids, context_length=model.manifest.context_length)


async def _send_ids(context: Any, generation_id: str, request_id: str, more: Metadata = ()) -> None:
    """At once, before slow work: a client that hears nothing more can still ask."""
    await context.send_initial_metadata((("x-generation-id", generation_id), ("x-request-id", request_id), *more))


@contextmanager
def _span(name: str, new: NewRequest) -> Iterator[trace.Span]:
    """A span that is handed on by hand: a stream's generator must not leave it current between messages."""
    attributes = {"generation_id": new.generation_id, "request_id": new.request_id}
    span = tracer().start_span(name, attributes=attributes)
    try:
        yield span
    finally:
        span.end()


def _accepted(committed: Committed, request_id: str) -> types_pb2.Accepted:
    return types_pb2.Accepted(
        generation_id=committed.generation_id,
        request_id=request_id,
        created=committed.created,
        state=encode_state(committed.state),
        prompt_tokens=committed.prompt_tokens,
    )


def _accepted_again(record: GenerationRecord) -> types_pb2.Accepted:
    return types_pb2.Accepted(
        generation_id=record.generation_id,
        request_id=record.request_id,
        created=False,
        state=encode_state(record.state),
        prompt_tokens=record.num_prompt_tokens,
    )
