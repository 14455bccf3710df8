"""The tenants' weights as the queue's entries need them: asked for in bulk, kept for a few seconds."""

from collections.abc import Callable, Collection, Mapping

from service_kit.errors import UnavailableError
from service_kit.ids import TenantId
from service_kit.logging import get_logger
from state_store.tenant_store import WeightStore

_log = get_logger()

KEPT_S = 5.0
"""How soon a changed weight is noticed."""
DEFAULT_WEIGHT = 1.0
MAX_TENANTS = 100_000


class TenantWeights:
    """One per scheduler process. `clock` is monotonic seconds."""

    def __init__(self, *, store: WeightStore, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._known: dict[TenantId, tuple[float, float]] = {}

    async def of(self, tenant_ids: Collection[TenantId]) -> Mapping[TenantId, float]:
        """A weight for each: that of a tenant that nobody knows is 1. Never fails: fairness is no reason to keep work
        from being queued, so without the store older weights go on, or 1."""
        now_s = self._clock()
        wanted = set(tenant_ids)
        stale = [tenant_id for tenant_id in sorted(wanted) if self._known.get(tenant_id, (0.0, now_s))[1] <= now_s]
        if stale:
            await self._refresh(stale, now_s)
        return {tenant_id: self._known.get(tenant_id, (DEFAULT_WEIGHT, 0.0))[0] for tenant_id in wanted}

    async def _refresh(self, tenant_ids: list[TenantId], now_s: float) -> None:
        try:
            found = await self._store.weights(tenant_ids)
        except UnavailableError as error:
            _log.warning("weights_not_read", reason=error.reason, count=len(tenant_ids))
            return
        if len(self._known) + len(tenant_ids) > MAX_TENANTS:
            self._known.clear()  # those still in use are asked for again
        for tenant_id in tenant_ids:
            self._known[tenant_id] = (found.get(tenant_id, DEFAULT_WEIGHT), now_s + KEPT_S)
