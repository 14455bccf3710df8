"""The whole store in memory: for unit tests and as the model that Postgres is compared with."""

from state_store.memory.generations import MemoryGenerationWrites
from state_store.memory.keys import MemoryKeys
from state_store.memory.quota_use import MemoryQuotaUse
from state_store.memory.reads import MemoryGenerationReads
from state_store.memory.retention import MemoryRetention
from state_store.memory.sessions import MemorySessions
from state_store.memory.usage import MemoryUsage


class MemoryStore(
    MemoryGenerationWrites,
    MemoryGenerationReads,
    MemorySessions,
    MemoryKeys,
    MemoryUsage,
    MemoryRetention,
    MemoryQuotaUse,
):
    """GenerationStore, SessionStore, TenantStore, UsageStore, RetentionStore and QuotaRecords over one shared state; nothing
    outlives the process."""
