from collections.abc import AsyncIterator

import pytest

from service_kit.api_key import parse_api_key
from service_kit.ids import TenantId
from sluice.keys import create_key, keep_or_create_key
from sluice.local.postgres import LocalPostgres
from state_store.postgres.migrate import upgrade
from state_store.postgres.store import PostgresStore

TENANT = TenantId("team-a")


@pytest.fixture
async def store(postgres_server: LocalPostgres, request: pytest.FixtureRequest) -> AsyncIterator[PostgresStore]:
    dsn = postgres_server.create_database(request.node.name[:60])
    upgrade(dsn)
    opened = PostgresStore(dsn)
    await opened.open()
    yield opened
    await opened.close()


async def test_a_created_key_is_found_by_prefix_and_proven_by_hash_for_its_tenant(store: PostgresStore) -> None:
    text = await create_key(store, TENANT)
    presented = parse_api_key(text)
    assert presented is not None
    found = await store.find_key(presented.prefix)
    assert found is not None
    assert presented.is_proven_by(found.key_hash)
    assert found.tenant.tenant_id == TENANT
    assert await create_key(store, TENANT) != text


async def test_a_stored_key_is_kept_while_it_is_in_force_and_replaced_otherwise(store: PostgresStore) -> None:
    first = await keep_or_create_key(store, "", TENANT)
    assert await keep_or_create_key(store, first, TENANT) == first
    assert await keep_or_create_key(store, first[:-4] + "xxxx", TENANT) != first
    presented = parse_api_key(first)
    assert presented is not None
    known = await store.find_key(presented.prefix)
    assert known is not None
    await store.revoke_key(known.key_id, actor="operator:test")
    assert await keep_or_create_key(store, first, TENANT) != first
