"""Calls of one tenant, made as lightly as possible: one asyncio process, bare stubs, no retries.

Every call keeps what its client saw. A tenant's `served` notes the tokens as they arrive: the prompt with the first text, each
output token with its delta.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from inference.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from service_kit.grpc_client import open_channel
from service_kit.rpc_status import parse_rpc_error
from tests.support.stack import MODEL

_TIMEOUT_S = 120.0
_PAUSE_AFTER_REFUSAL_S = 0.5
INTERACTIVE = types_pb2.PRIORITY_CLASS_INTERACTIVE
STANDARD = types_pb2.PRIORITY_CLASS_STANDARD
BATCH = types_pb2.PRIORITY_CLASS_BATCH


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. `grace_s` is how long it goes on when its reader leaves."""

    prompt: str
    output_tokens: int
    priority_class: types_pb2.PriorityClass.ValueType = STANDARD
    grace_s: int = 30
    request_id: str = ""

    def to_proto(self) -> inference_pb2.GenerateRequest:
        request = inference_pb2.GenerateRequest(request_id=self.request_id)
        request.spec.model = MODEL
        request.spec.prompt = self.prompt
        request.spec.priority_class = self.priority_class
        request.spec.sampling.seed = 1
        request.spec.sampling.max_output_tokens = self.output_tokens
        request.delivery.grace.seconds = self.grace_s
        return request


@dataclass(slots=True, kw_only=True)
class Call:
    """What the client of one request saw; moments are monotonic seconds, None: never."""

    ask: Ask
    started_s: float
    accepted_s: float | None = None
    first_text_s: float | None = None
    ended_s: float | None = None
    code: grpc.StatusCode | None = None
    """How it ended; None while it goes on."""
    reason: str = ""
    retry_after_s: float | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    """Of a refusal: what the error tells."""
    generation_id: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_prompt_tokens: int = 0
    text: str = ""
    is_cancelled: bool = False
    """Its generation was ended before its time."""

    @property
    def is_whole(self) -> bool:
        return self.code is grpc.StatusCode.OK and not self.is_cancelled

    @property
    def is_refused(self) -> bool:
        """Before it was accepted."""
        return self.code is not None and self.code is not grpc.StatusCode.OK and self.accepted_s is None

    @property
    def ttft_s(self) -> float:
        """From the call to the first text."""
        assert self.first_text_s is not None
        return self.first_text_s - self.started_s

    @property
    def duration_s(self) -> float:
        assert self.ended_s is not None
        return self.ended_s - self.started_s


class Tenant:
    """Calls with one key; `stubs` are the gateways, of which each call names one by index."""

    def __init__(
        self, name: str, api_key: str, stubs: Sequence["inference_pb2_grpc.InferenceServiceAsyncStub"]
    ) -> None:
        self.name = name
        self.api_key = api_key
        self.stubs = stubs
        self.metadata = (("authorization", f"Bearer {api_key}"),)
        self.calls: list[Call] = []
        self.served: list[tuple[float, int]] = []

    async def generate(self, ask: Ask, *, gateway: int = 0, timeout_s: float = _TIMEOUT_S) -> Call:
        """One stream to its end; what goes wrong stands in the call. Leaving it cancels the stream."""
        call = Call(ask=ask, started_s=time.monotonic())
        self.calls.append(call)
        stream: Any = self.stubs[gateway].Generate(ask.to_proto(), metadata=self.metadata, timeout=timeout_s)
        try:
            while (response := await stream.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                self._hear(call, response)
            call.code = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            failure = parse_rpc_error(error)
            call.code, call.reason, call.metadata = failure.code, failure.reason, dict(failure.metadata)
            call.retry_after_s = failure.retry_after.total_seconds() if failure.retry_after is not None else None
        finally:
            call.ended_s = time.monotonic()
            stream.cancel()
        return call

    def _hear(self, call: Call, response: inference_pb2.GenerateResponse) -> None:
        now_s = time.monotonic()
        if response.HasField("accepted"):
            call.accepted_s = now_s
            call.generation_id = response.accepted.generation_id
            call.prompt_tokens = response.accepted.prompt_tokens
            return
        delta = response.delta
        num_new = len(delta.token_ids)
        call.output_tokens += num_new
        call.text += delta.text
        if call.first_text_s is None and delta.text:
            call.first_text_s = now_s
            num_new += call.prompt_tokens
        call.is_cancelled = delta.finish_reason == types_pb2.FINISH_REASON_CANCELLED
        if delta.HasField("usage"):
            call.cached_prompt_tokens = delta.usage.cached_prompt_tokens
        if num_new:
            self.served.append((now_s, num_new))

    def served_between(self, since_s: float, until_s: float) -> int:
        """Tokens."""
        return sum(count for at_s, count in self.served if since_s <= at_s < until_s)

    def ttfts_s(self, since_s: float, until_s: float) -> list[float]:
        """Of the calls that began then and got a text."""
        return [
            call.ttft_s for call in self.calls if since_s <= call.started_s < until_s and call.first_text_s is not None
        ]


MakeAsk = Callable[[random.Random], Ask]


def asks(
    *, prompt_tokens: int, output_tokens: int, priority_class: types_pb2.PriorityClass.ValueType = STANDARD
) -> MakeAsk:
    """Requests with prompts of their own and outputs 20 % around `output_tokens`, so that they do not march in step."""

    def make(rng: random.Random) -> Ask:
        letters = f"{rng.getrandbits(64):016x}"
        prompt = (letters * (prompt_tokens // 16 + 1))[: max(1, prompt_tokens - 1)]
        spread = max(1, round(output_tokens * 0.2))
        length = max(1, output_tokens + rng.randint(-spread, spread))
        return Ask(prompt=prompt, output_tokens=length, priority_class=priority_class)

    return make


class Backlog:
    """Keeps `count` requests in flight, a new one when one ends, until it `is_over`."""

    def __init__(self, tenant: Tenant, make: MakeAsk, rng: random.Random, *, count: int) -> None:
        self.is_over = False
        self._tenant = tenant
        self._make = make
        self._rng = rng
        self._count = count

    async def run(self) -> None:
        """Returns when it is over and all requests have ended."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._count):
                tasks.create_task(self._one())

    async def _one(self) -> None:
        while not self.is_over:
            call = await self._tenant.generate(self._make(self._rng))
            if not call.is_whole:
                await asyncio.sleep(_PAUSE_AFTER_REFUSAL_S)


async def send_at_random(
    tenant: Tenant, make: MakeAsk, rng: random.Random, *, per_s: float, for_s: float, gateways: int = 1
) -> None:
    """Requests as they come (Poisson), whatever becomes of those before; waits for all of them."""
    due_s = time.monotonic()
    until_s = due_s + for_s
    async with asyncio.TaskGroup() as tasks:
        number = 0
        while (due_s := due_s + rng.expovariate(per_s)) < until_s:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            tasks.create_task(tenant.generate(make(rng), gateway=number % gateways))
            number += 1


@asynccontextmanager
async def background(*loads: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs coroutines beside the block and cancels them behind it; what one raises breaks the block off."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(load) for load in loads]
        try:
            yield
        finally:
            for task in running:
                task.cancel()


@asynccontextmanager
async def backlogs(*loads: Backlog) -> AsyncIterator[None]:
    """Runs them beside the block, and behind it lets their requests end."""
    async with asyncio.TaskGroup() as tasks:
        for load in loads:
            tasks.create_task(load.run())
        yield
        for load in loads:
            load.is_over = True


@asynccontextmanager
async def gateway_stubs(targets: Sequence[str]) -> AsyncIterator[list["inference_pb2_grpc.InferenceServiceAsyncStub"]]:
    """One connection to each gateway."""
    async with contextlib.AsyncExitStack() as exits:
        channels = [open_channel(target) for target in targets]
        for channel in channels:
            exits.push_async_callback(channel.close, None)
        yield [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
