"""Limits while processes die: reservations come back or stay as their rows say, and lost counts are those before."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Protocol

import grpc
from redis import Redis
from redis.exceptions import RedisError

from inference.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from service_kit.api_key import mint_api_key
from service_kit.grpc_client import open_channel
from service_kit.rpc_status import RpcFailure, parse_rpc_error
from sluice.local.services import Service
from state_store.postgres.store import PostgresStore
from state_store.tenants import QuotaLimits
from tests.support.gateway import bearer
from tests.support.stack import MODEL, RunningStack, eventually
from tests.support.tenants import add_tenant, store_key

SLACK_S = 1.5


class Create(Protocol):
    """Asks a gateway for a generation of so many tokens."""

    async def __call__(self, max_output_tokens: int, *, gateway: int = 0) -> types_pb2.Accepted | RpcFailure: ...


@asynccontextmanager
async def limited_key(stack: RunningStack, tenant: str, limits: QuotaLimits) -> AsyncIterator[Create]:
    """Of a new tenant with limits; at the end all its generations are cancelled, and then none of its places is taken."""
    text, presented = mint_api_key()
    store = PostgresStore(stack.local.dsn)
    await store.open()
    await add_tenant(store, tenant, limits=limits)
    await store_key(store, tenant, presented)
    await store.close()
    metadata, accepted = bearer(text), list[types_pb2.Accepted]()
    channels = [open_channel(target) for target in stack.local.gateways]
    stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]

    async def create(max_output_tokens: int, *, gateway: int = 0) -> types_pb2.Accepted | RpcFailure:
        sampling = types_pb2.Sampling(max_output_tokens=max_output_tokens, ignore_eos=True)
        spec = types_pb2.GenerationSpec(model=MODEL, prompt="limited", sampling=sampling)
        request = inference_pb2.CreateGenerationRequest(spec=spec)
        call = stubs[gateway].CreateGeneration(request, metadata=metadata, timeout=10)
        try:
            accepted.append((await call).accepted)
        except grpc.aio.AioRpcError as error:
            return parse_rpc_error(error)
        return accepted[-1]

    try:
        yield create
        for each in accepted:
            ref = inference_pb2.GenerationRef(generation_id=each.generation_id)
            await stubs[0].CancelGeneration(
                inference_pb2.CancelGenerationRequest(generation=ref), metadata=metadata, timeout=10
            )
        await _settles_at(stack, tenant, 0, within_s=10)
    finally:
        for channel in channels:
            await channel.close(None)


def num_reservations(stack: RunningStack, tenant: str) -> int:
    """Live ones by the tenant's count."""
    with suppress(RedisError), Redis.from_url(stack.local.valkey.url) as redis:
        keys = redis.keys("{quota:*}:concurrent")
        return sum(int(redis.hget(key, f"tenant:{tenant}") or 0) for key in keys)
    return -1


async def _until_accepted(create: Create) -> None:
    """A stack that has just started may not know its workers yet."""

    async def is_accepted() -> bool:
        return isinstance(await create(1500), types_pb2.Accepted)

    await eventually(is_accepted, what="accepted")


async def _settles_at(stack: RunningStack, tenant: str, number: int, *, within_s: float = 30) -> None:
    async def has_number() -> bool:
        return await asyncio.to_thread(num_reservations, stack, tenant) == number

    await eventually(has_number, what=f"{number} reservations", timeout_s=within_s)


async def test_a_killed_gateways_reservation_is_back_within_10_s_and_running_ones_stay(stack: RunningStack) -> None:
    async with limited_key(stack, "killed", QuotaLimits(max_concurrent=2)) as create:
        await _until_accepted(create)
        stack.crash_file.write_text("quota.reserved")
        lost = await create(1500, gateway=1)
        died_at = time.monotonic()
        assert isinstance(lost, RpcFailure)
        assert not stack.crash_file.exists()
        assert num_reservations(stack, "killed") == 2
        await _settles_at(stack, "killed", 1)
        took_s = time.monotonic() - died_at
        print(f"reservation, before submit: back after {took_s:.2f} s")
        assert took_s < 10 + SLACK_S
        assert isinstance(await create(1500), types_pb2.Accepted)
        refused = await create(1500)
        assert isinstance(refused, RpcFailure)
        assert (refused.code, refused.quota_subject) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "tenant:killed:max_concurrent",
        )


async def test_limits_hold_again_within_5_s_after_redis_was_emptied(stack: RunningStack) -> None:
    async with limited_key(stack, "emptied", QuotaLimits(max_concurrent=2)) as create:
        await _until_accepted(create)
        await _until_accepted(create)
        emptied_at = time.monotonic()
        await asyncio.to_thread(stack.empty_valkey)
        answers: list[types_pb2.Accepted | RpcFailure] = []

        async def is_limited() -> bool:
            answers.append(await create(1500))
            return isinstance(answers[-1], RpcFailure) and answers[-1].code is grpc.StatusCode.RESOURCE_EXHAUSTED

        await eventually(is_limited, what="the limit holds again")
        took_s = time.monotonic() - emptied_at
        print(f"emptied: limits hold again after {took_s:.2f} s")
        assert took_s < 5 + SLACK_S
        assert not any(isinstance(answer, types_pb2.Accepted) for answer in answers)
        assert stack.names(Service.GATEWAY)
