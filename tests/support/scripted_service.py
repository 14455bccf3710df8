"""A public inference service that behaves by script, one step per call: for tests of clients."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from inference.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from service_kit.delta import Cursor, extend_chain
from service_kit.errors import SluiceError
from service_kit.rpc_status import to_grpc_status

OUTPUT = tuple(range(100, 120))


def chain_at(position: int) -> int:
    return extend_chain(0, OUTPUT[:position])


@dataclass
class Step:
    """What one call does: accept (or not), send tokens up to `until`, then end as stated."""

    until: int = len(OUTPUT)
    error: SluiceError | None = None
    bare_code: grpc.StatusCode | None = None
    is_accepting: bool = True
    is_ending_early: bool = False
    is_hanging: bool = False
    tamper: Callable[[types_pb2.Delta], None] | None = None


@dataclass
class ScriptedService(inference_pb2_grpc.InferenceServiceServicer):
    steps: list[Step] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    target: str = ""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802 - gRPC's name
        async for response in self._answer(request, context, inference_pb2.GenerateResponse):
            yield response

    async def StreamGeneration(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802 - gRPC's name
        async for response in self._answer(request, context, inference_pb2.StreamGenerationResponse):
            yield response

    async def CancelGeneration(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        self.requests.append(request)
        step = self.steps.pop(0) if self.steps else Step()
        await self._end(step, context)
        return inference_pb2.CancelGenerationResponse(state=types_pb2.GENERATION_STATE_CANCELLED)

    async def _answer(self, request: Any, context: Any, response_type: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        step = self.steps.pop(0) if self.steps else Step()
        if step.is_accepting:
            yield response_type(
                accepted=types_pb2.Accepted(
                    generation_id="g-1",
                    request_id="r-1",
                    created=len(self.requests) == 1,
                    state=types_pb2.GENERATION_STATE_RUNNING,
                    prompt_tokens=7,
                )
            )
        position = request.cursor.sequence_number
        while position < step.until:
            ids = OUTPUT[position : min(position + 3, step.until)]
            delta = types_pb2.Delta(
                first_sequence_number=position + 1, token_ids=ids, text="".join(f"<{token_id}>" for token_id in ids)
            )
            position += len(ids)
            delta.cursor.sequence_number, delta.cursor.chain = position, chain_at(position)
            if step.tamper is not None:
                step.tamper(delta)
            yield response_type(delta=delta)
        await self._end(step, context)
        if not step.is_ending_early:
            usage = types_pb2.Usage(prompt_tokens=7, cached_prompt_tokens=2, output_tokens=position)
            yield response_type(
                delta=types_pb2.Delta(
                    finish_reason=types_pb2.FINISH_REASON_STOP,
                    usage=usage,
                    cursor=_cursor(position),
                    matched_stop="END",
                )
            )

    async def _end(self, step: Step, context: Any) -> None:
        if step.is_hanging:
            await asyncio.Event().wait()
        if step.error is not None:
            await context.abort_with_status(to_grpc_status(step.error, request_id="r-1"))
        if step.bare_code is not None:
            await context.abort(step.bare_code, "bare")


def _cursor(position: int) -> types_pb2.Cursor:
    return types_pb2.Cursor(sequence_number=position, chain=chain_at(position))


def cursor_at(position: int) -> Cursor:
    return Cursor(sequence_number=position, chain=chain_at(position))
