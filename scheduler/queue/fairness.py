"""Virtual token counters of one model's tenants (VTC; Sheng et al. 2024), in whole millionths of a token. Pure.

The same rules stand in lua/fairness.lua, number for number.
"""

from collections import Counter


class TenantCounters:
    """Owner of the counters. A tenant is active while it has an entry, and waits while it has a waiting one.

    An idle tenant's counter is kept only while it is above `level`: below it, lifting gives the same.
    """

    def __init__(self) -> None:
        self.active: dict[str, int] = {}
        self.idle: dict[str, int] = {}
        self.floor = 0
        """What the last served tenant had before its last pop."""
        self._num_waiting: Counter[str] = Counter()

    @property
    def smallest_waiting(self) -> int | None:
        return min((self.active[tenant] for tenant in self._num_waiting), default=None)

    @property
    def level(self) -> int:
        """No counter of a tenant that comes to wait will be below this."""
        smallest = self.smallest_waiting
        return self.floor if smallest is None else min(self.floor, smallest)

    def activate(self, tenant: str) -> None:
        """The tenant has an entry; idempotent."""
        if tenant not in self.active:
            level = self.level
            self.active[tenant] = self.idle.pop(tenant, level)

    def settle(self, tenant: str) -> None:
        """The tenant has no entry any more."""
        counter = self.active.pop(tenant)
        if counter > self.level:
            self.idle[tenant] = counter

    def lift(self, tenant: str) -> None:
        """Before the tenant's next entry waits: one that comes back from idleness brings no credit."""
        if tenant in self._num_waiting:
            return
        smallest = self.smallest_waiting
        self.active[tenant] = max(self.active[tenant], self.floor if smallest is None else smallest)

    def begin_waiting(self, tenant: str) -> None:
        self._num_waiting[tenant] += 1

    def end_waiting(self, tenant: str) -> None:
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]

    def serve(self, tenant: str, cost: int) -> None:
        """A pop: charges it and moves the floor."""
        self.floor = self.active[tenant]
        self.active[tenant] += cost

    def refund(self, tenant: str, cost: int) -> None:
        self.active[tenant] -= cost

    def charge(self, tenant: str, cost: int) -> None:
        """Output of a tenant that may have no entry."""
        if tenant in self.active:
            self.active[tenant] += cost
        elif cost > 0:
            self.idle[tenant] = self.idle.get(tenant, self.level) + cost

    def prune(self) -> None:
        """Forgets what lifting gives back as well."""
        level = self.level
        self.idle = {tenant: counter for tenant, counter in self.idle.items() if counter > level}

    def rebase(self, limit: int) -> None:
        """Subtracts the smallest from all where it reaches `limit`; order and differences stay."""
        level = self.level
        if level < limit:
            return
        self.floor -= level
        for counters in (self.active, self.idle):
            for tenant in counters:
                counters[tenant] -= level
