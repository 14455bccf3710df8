"""Output tokens on their way to the tenants' counters in the queue: gathered, and handed over a few times a second.

What is not handed over when the process dies was served for nothing: at most what was made in one interval.
"""

from collections import Counter

from scheduler.queue.port import AdmissionQueue, OutputCharge
from scheduler.tenant_weights import TenantWeights
from service_kit.errors import UnavailableError
from service_kit.ids import TenantId
from service_kit.logging import get_logger
from state_store.model import ModelKey

_log = get_logger()

FLUSH_S = 0.2


class OutputCharges:
    """One per scheduler process; at most one number per model and tenant is kept."""

    def __init__(self, *, queue: AdmissionQueue, weights: TenantWeights) -> None:
        self._queue = queue
        self._weights = weights
        self._tokens: Counter[tuple[ModelKey, TenantId]] = Counter()

    def note(self, model_key: ModelKey, tenant_id: TenantId, tokens: int) -> None:
        """Tokens that were just appended for the first time."""
        self._tokens[model_key, tenant_id] += tokens

    async def flush_once(self) -> None:
        """Charges what has gathered. What the queue does not take is dropped: repeating it might charge it twice."""
        if not self._tokens:
            return
        tokens, self._tokens = self._tokens, Counter()
        weights = await self._weights.of({tenant_id for _, tenant_id in tokens})
        charges = [
            OutputCharge(model_key=model_key, tenant_id=tenant_id, weight=weights[tenant_id], tokens=count)
            for (model_key, tenant_id), count in tokens.items()
        ]
        try:
            await self._queue.charge_many(charges)
        except UnavailableError as error:
            _log.warning("output_not_charged", reason=error.reason, tokens=tokens.total())
