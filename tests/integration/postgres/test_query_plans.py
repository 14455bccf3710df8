"""Hot statements must find their rows by index, whatever else the tables hold and however many days there are."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from tests.support.filled_tables import Plans, fill, partitions_of
from tests.support.hot_statements import BY_ID, HOT

NOW = datetime.now(UTC)
FILLED_AGES = (0, 1, 20)
FILLED = {"request_keys", "worker_sessions"}.union(*(partitions_of(NOW - timedelta(days=age)) for age in FILLED_AGES))


@pytest.fixture(scope="module")
def filled_dsn(make_store_dsn: Callable[[], str]) -> str:
    """Partitions of a month; on three days ended generations with keys, attempts and chunks."""
    dsn = make_store_dsn()
    fill(dsn, now=NOW, rows_by_age=dict(zip(FILLED_AGES, (20_000, 5_000, 5_000), strict=True)), num_days=30)
    return dsn


@pytest.mark.parametrize("num_uses", [0, 8])
@pytest.mark.parametrize("name", HOT)
def test_no_hot_statement_scans_a_filled_table(filled_dsn: str, name: str, num_uses: int) -> None:
    assert Plans(filled_dsn, num_uses=num_uses).scanned(*HOT[name], sorted(FILLED)) == []


@pytest.mark.parametrize("name", BY_ID)
def test_what_names_its_ids_is_planned_for_their_days_alone(filled_dsn: str, name: str) -> None:
    assert Plans(filled_dsn, num_uses=0).considered(*HOT[name]) <= partitions_of(NOW)


def test_the_guard_sees_a_scan_and_every_day(filled_dsn: str) -> None:
    plans = Plans(filled_dsn, num_uses=0)
    statement = "SELECT count(*) FROM generations WHERE model = %(model)s"
    assert set(plans.scanned(statement, {"model": "m"}, sorted(FILLED))) == {
        name for name in FILLED if name.startswith("generations_")
    }
    assert len(plans.considered(statement, {"model": "m"})) >= 30
