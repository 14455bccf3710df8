"""Statements about tenants, keys, changes and usage find their rows by index, however much there is."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from state_store.postgres import keys, tenants, usage
from state_store.tenant_store import UsageDimension, UsageQuery

NOW = datetime.now(UTC)
WEEK = UsageQuery(tenant_id=None, since=NOW - timedelta(days=7), until=NOW, group_by=tuple(UsageDimension))
OF_TENANT = UsageQuery(tenant_id="t7", since=NOW - timedelta(days=30), until=NOW, group_by=())
PAGE = {"limit": 50, "before": None, "include_over": False, "now": None}
FILLED = {"usage_ledger", "tenants", "api_keys", "admin_audit"}

STATEMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "usage": (usage.statement(WEEK), {"since": WEEK.since, "until": WEEK.until}),
    "usage_of_tenant": (
        usage.statement(OF_TENANT),
        {"since": OF_TENANT.since, "until": OF_TENANT.until, "tenant_id": "t7"},
    ),
    "find_key": (keys.FIND_KEY, {"prefix": "p7"}),
    "lock_key": (keys._LOCK_KEY, {"key_id": "k7", "now": None}),
    "list_keys": (keys.LIST_KEYS, PAGE),
    "list_keys_behind": (keys.LIST_KEYS, PAGE | {"before": "k7"}),
    "list_keys_of_tenant": (keys.LIST_KEYS_OF_TENANT, PAGE | {"tenant_id": "t7"}),
    "get_tenant": (tenants.GET_TENANT, {"tenant_id": "t7"}),
    "lock_tenant": (tenants._LOCK_TENANT, {"tenant_id": "t7", "now": None}),
    "list_tenants": (tenants.LIST_TENANTS, {"after": "t7", "limit": 50}),
    "weights": (tenants.WEIGHTS, {"tenant_ids": ["t7", "t8"]}),
    "list_audit": (tenants.LIST_AUDIT, {"before": None, "limit": 50}),
    "list_audit_of_target": (tenants.LIST_AUDIT_OF_TARGET, {"target": "t7", "before": None, "limit": 50}),
}


@pytest.fixture(scope="module")
def filled_dsn(make_store_dsn: Callable[[], str]) -> str:
    """A ledger of 1,000 days, 5,000 tenants with two keys each, and as many changes."""
    dsn = make_store_dsn()
    with psycopg.connect(dsn) as connection:
        connection.execute(
            "INSERT INTO usage_ledger SELECT uuidv7(), 't' || i % 50, 'k', 'm', 'BATCH', 'SUCCEEDED', 1, 0, 1,"
            " now() - make_interval(hours => i) FROM generate_series(1, 24000) i"
        )
        connection.execute(
            "INSERT INTO tenants (tenant_id, name, weight, max_class)"
            " SELECT 't' || i, '', 1, 'BATCH' FROM generate_series(1, 5000) i"
        )
        connection.execute(
            "INSERT INTO api_keys (key_id, tenant_id, prefix, key_hash, created_at)"
            " SELECT 'k' || i, 't' || 1 + i % 5000, 'p' || i, ''::bytea, now() - make_interval(secs => i)"
            " FROM generate_series(1, 10000) i"
        )
        connection.execute(
            "INSERT INTO admin_audit (at, actor, action, target, details)"
            " SELECT now(), 'a', 'tenant.create', 't' || i, '{}' FROM generate_series(1, 5000) i"
        )
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")
    return dsn


def nodes(plan: dict) -> list[dict]:
    return [plan, *(node for child in plan.get("Plans", []) for node in nodes(child))]


def scans(dsn: str, statement: str, parameters: dict[str, Any]) -> list[str]:
    """The filled tables that the plan of the statement reads as a whole."""
    with psycopg.connect(dsn) as connection:
        row = connection.execute(f"EXPLAIN (FORMAT JSON) {statement}", parameters).fetchone()
    assert row is not None
    found = nodes(row[0][0]["Plan"])
    return [
        node["Relation Name"] for node in found if node["Node Type"] == "Seq Scan" and node["Relation Name"] in FILLED
    ]


@pytest.mark.parametrize("name", STATEMENTS)
def test_no_statement_scans_a_filled_table(filled_dsn: str, name: str) -> None:
    assert scans(filled_dsn, *STATEMENTS[name]) == []


def test_the_guard_sees_a_scan(filled_dsn: str) -> None:
    assert scans(filled_dsn, "SELECT sum(output_tokens) FROM usage_ledger", {}) == ["usage_ledger"]


@pytest.mark.parametrize(
    "name", ["list_keys", "list_keys_behind", "list_tenants", "list_audit", "list_audit_of_target"]
)
def test_a_page_comes_in_the_order_of_its_index(filled_dsn: str, name: str) -> None:
    statement, parameters = STATEMENTS[name]
    with psycopg.connect(filled_dsn) as connection:
        row = connection.execute(f"EXPLAIN (FORMAT JSON) {statement}", parameters).fetchone()
    assert row is not None
    assert [node for node in nodes(row[0][0]["Plan"]) if node["Node Type"] == "Sort"] == []
