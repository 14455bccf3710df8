"""How the quotas use the server: hash tags, its clock, its faults."""

import time
from datetime import UTC, datetime, timedelta

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from service_kit.ids import TenantId, new_generation_id
from sluice.local.valkey import LocalValkey
from state_store.quota.errors import LimitReachedError, QuotaNotReadyError, QuotaUnavailableError
from state_store.quota.port import PastUse, QuotaCharge, QuotaKind, QuotaScope
from state_store.quota.redis_quota import RedisQuota
from tests.support.quotas import KEY, TENANT, limited, settlement_of, subject_of

SUBJECT = limited(QuotaScope.TENANT, QuotaKind.REQUESTS_PER_MINUTE, 1)


def charge_of(tenant_id: TenantId = TENANT) -> QuotaCharge:
    return QuotaCharge(
        generation_id=new_generation_id(), tenant_id=tenant_id, key_id=KEY, prompt_tokens=1, max_output_tokens=9
    )


async def make_ready(quota: RedisQuota) -> None:
    assert await quota.begin_rebuild()
    await quota.mark_ready()


async def test_all_keys_of_a_tenant_share_a_slot_and_tenants_are_spread(client: Redis) -> None:
    quota = RedisQuota(client)
    assert await quota.begin_rebuild()
    names = [TenantId(name) for name in ("}{", "a b", "c", "d", "e", "f", "g", "h")]
    now = datetime.now(UTC)
    past = [
        PastUse(tenant_id=name, key_id=KEY, by_second=((now, 1, 1),), day_tokens=1, month_tokens=1) for name in names
    ]
    await quota.rebuild([charge_of(name) for name in names], past)
    tags = {key.decode().partition("}:")[0] for key in await client.keys("*")}
    assert tags == {f"{{quota:{shard}" for shard in range(4)}
    await quota.mark_ready()
    for name in names:
        charge = charge_of(name)
        await quota.reserve(charge, subject_of(tenant_id=name))
        await quota.bind_many([charge])
        await quota.settle_many([settlement_of(charge, 5)])
    slots: dict[str, set[int]] = {}
    for key in await client.keys("*"):
        slots.setdefault(key.decode().partition("}:")[0], set()).add(key_slot(key))
    assert [len(of_shard) for of_shard in slots.values()] == [1] * 4


async def test_counts_go_by_the_clock_of_the_server(client: Redis) -> None:
    quota = RedisQuota(client)
    await make_ready(quota)
    await quota.reserve(charge_of(), SUBJECT)
    with pytest.raises(LimitReachedError) as caught:
        await quota.look(SUBJECT)
    assert timedelta(seconds=50) < caught.value.retry_after <= timedelta(seconds=61)
    (second,) = [
        int(field)
        for field in await client.hkeys(f"{{quota:{quota._shard(TENANT)}}}:requests:tenant:{TENANT}")
        if field.isdigit()
    ]
    assert abs(second - time.time()) < 30


async def test_a_shard_that_alone_lost_its_keys_is_rebuilt_alone(client: Redis) -> None:
    quota = RedisQuota(client)
    await make_ready(quota)
    names = [TenantId(f"tenant-{number}") for number in range(12)]
    charges = [charge_of(name) for name in names]
    await quota.bind_many(charges)
    lost = quota._shard(names[0])
    await client.delete(*await client.keys(f"{{quota:{lost}}}*"))
    assert not await quota.is_ready()
    with pytest.raises(QuotaNotReadyError):
        await quota.bind_many(charges[:1])
    assert await quota.begin_rebuild()
    await quota.rebuild(charges, [])
    await quota.mark_ready()
    counts = [await client.hget(f"{{quota:{quota._shard(name)}}}:concurrent", f"tenant:{name}") for name in names]
    assert counts == [b"1"] * 12


async def test_a_server_that_is_away_is_unavailable_and_not_an_internal_error(
    own_client: Redis, own_server: LocalValkey
) -> None:
    quota = RedisQuota(own_client)
    await make_ready(quota)
    own_server.kill()
    for call in (
        quota.look(SUBJECT),
        quota.reserve(charge_of(), SUBJECT),
        quota.settle_many([settlement_of(charge_of(), 1)]),
        quota.is_ready(),
        quota.begin_rebuild(),
    ):
        with pytest.raises(QuotaUnavailableError):
            await call


async def test_the_number_of_shards_is_at_least_one(client: Redis) -> None:
    with pytest.raises(ValueError, match="num_shards"):
        RedisQuota(client, num_shards=0)
