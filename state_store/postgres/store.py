"""The whole store in Postgres."""

from state_store.postgres.generations import PostgresGenerations
from state_store.postgres.keys import PostgresKeys
from state_store.postgres.overview import PostgresOverview
from state_store.postgres.pool import Database, PoolSettings
from state_store.postgres.quota_use import PostgresQuotaUse
from state_store.postgres.retention import PostgresRetention
from state_store.postgres.sessions import PostgresSessions
from state_store.postgres.tenants import PostgresTenants
from state_store.postgres.usage import PostgresUsage
from state_store.pulse import Pulse

_DEFAULT_SETTINGS = PoolSettings()


class PostgresStore(
    PostgresGenerations,
    PostgresSessions,
    PostgresTenants,
    PostgresKeys,
    PostgresUsage,
    PostgresRetention,
    PostgresOverview,
    PostgresQuotaUse,
):
    """GenerationStore, SessionStore, TenantStore, UsageStore, RetentionStore, OverviewStore and QuotaRecords over one
    connection pool. The schema must be there (migrate.py)."""

    def __init__(self, dsn: str, *, settings: PoolSettings = _DEFAULT_SETTINGS) -> None:
        super().__init__(Database(dsn, settings))

    @property
    def pulse(self) -> Pulse:
        """Whether Postgres answers, for callers that cannot wait."""
        return self._database.pulse

    async def open(self) -> None:
        """Starts the pool; does not wait for Postgres."""
        await self._database.open()

    async def close(self) -> None:
        """Closes all connections; later calls raise StoreUnavailableError."""
        await self._database.close()
