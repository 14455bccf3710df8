"""Random steps of callers: each is taken by a real gateway and scheduler, and by the model of their requests."""

from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

from inference.v1 import inference_pb2, types_pb2
from scheduler.queue.port import QueueEntry
from service_kit.ids import GenerationId
from state_store.model import PriorityClass
from state_store.tenants import ApiKey
from tests.support.live_requests import Request
from tests.support.quota_keys import Charge
from tests.support.request_world import World

CLASSES = dict(zip(PriorityClass, types_pb2.PriorityClass.values()[1:], strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a caller wants."""

    num_prompt: int
    max_output: int
    priority_class: PriorityClass
    queue_timeout: timedelta
    deadline: timedelta | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.max_output


class Callers:
    """`done` counts what happened."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.random = world.random
        self.done: Counter[str] = Counter()

    async def submit(self) -> None:
        world, now = self.world, self.world.now()
        text, key = self.random.choice(list(world.keys.values()))
        mine = world.calls[key.tenant.tenant_id]
        if mine and self.random.random() < 0.1:
            await self._attach(text, self.random.choice(mine))
            return
        ask = self._any_ask()
        call = inference_pb2.CreateGenerationRequest(
            request_id=f"request-{self.done.total()}",
            spec=types_pb2.GenerationSpec(
                model=world.manifest.model,
                token_ids=types_pb2.TokenIds(ids=range(ask.num_prompt)),
                sampling=types_pb2.Sampling(max_output_tokens=ask.max_output),
                priority_class=CLASSES[ask.priority_class],
            ),
            delivery=types_pb2.Delivery(queue_timeout=_duration(ask.queue_timeout), deadline=_duration(ask.deadline)),
        )
        has_place = world.book.has_place(key, tokens=ask.num_tokens, now=now)
        try:
            answer = await world.stub.CreateGeneration(call, metadata=_bearer(text))
        except grpc.aio.AioRpcError as refusal:
            _check_code(refusal, grpc.StatusCode.RESOURCE_EXHAUSTED, is_right=not has_place)
            self.done["refused"] += 1
            return
        assert has_place
        assert answer.accepted.created
        generation_id = GenerationId(answer.accepted.generation_id)
        self.accept(generation_id, key, ask)
        world.book.charges[generation_id] = Charge.of(key, ask.num_tokens, now)
        world.book.bind(generation_id, now)
        mine.append(call)
        self.done["submitted"] += 1

    def _any_ask(self) -> Ask:
        seconds = self.random.randrange
        return Ask(
            num_prompt=self.random.randrange(1, 90),
            max_output=self.random.randrange(1, 40),
            priority_class=self.random.choice(list(CLASSES)),
            queue_timeout=timedelta(seconds=seconds(4, 40)),
            deadline=timedelta(seconds=seconds(4, 40)) if self.random.random() < 0.4 else None,
        )

    async def _attach(self, text: str, call: Any) -> None:
        """The same once more, or another one with its request id: nothing is charged, whatever has become of it."""
        again = inference_pb2.CreateGenerationRequest()
        again.CopyFrom(call)
        conflicts = self.random.random() < 0.3
        if conflicts:
            again.spec.token_ids.ids.append(1)
        try:
            answer = await self.world.stub.CreateGeneration(again, metadata=_bearer(text))
        except grpc.aio.AioRpcError as refusal:
            _check_code(refusal, grpc.StatusCode.ALREADY_EXISTS, is_right=conflicts)
        else:
            assert not conflicts
            assert not answer.accepted.created
        self.done["conflicts" if conflicts else "attached"] += 1

    def accept(self, generation_id: GenerationId, key: ApiKey, ask: Ask) -> Request:
        now = self.world.now()
        limits = [now + limit for limit in (ask.queue_timeout, ask.deadline) if limit is not None]
        entry = QueueEntry(
            generation_id=generation_id,
            attempt=0,
            model_key=self.world.model_key,
            tenant_id=key.tenant.tenant_id,
            weight=key.tenant.weight,
            priority_class=ask.priority_class,
            prompt_tokens=ask.num_prompt,
            max_tokens=ask.num_prompt + 1,
            arrived_at=now,
            order_at=min(limits),
            deadline_at=min(limits),
        )
        request = Request(
            entry=entry,
            key=key,
            max_output=ask.max_output,
            queue_deadline_at=now + ask.queue_timeout,
            deadline_at=now + ask.deadline if ask.deadline is not None else None,
            queued_at=now,
        )
        self.world.live[generation_id] = request
        return request

    async def cancel(self) -> None:
        if not self.world.live:
            return
        request = self.random.choice(list(self.world.live.values()))
        await self.cancel_one(request)
        self.done["cancelled"] += 1

    async def cancel_one(self, request: Request) -> None:
        ref = inference_pb2.GenerationRef(generation_id=request.generation_id)
        text, _ = self.world.keys[request.key.key_id]
        call = inference_pb2.CancelGenerationRequest(generation=ref)
        await self.world.stub.CancelGeneration(call, metadata=_bearer(text))
        if request.is_running:
            request.is_cancelled = True
        else:
            self.world.end(request)


def _duration(value: timedelta | None) -> Duration | None:
    return None if value is None else Duration(seconds=int(value.total_seconds()))


def _bearer(text: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {text}"),)


def _check_code(refusal: grpc.aio.AioRpcError, code: grpc.StatusCode, *, is_right: bool) -> None:
    assert refusal.code() is code, refusal
    assert is_right, refusal
