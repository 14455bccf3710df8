"""What one call costs its tenant: refused early, reserved before it is submitted, told in the call's metadata.

Attaching is never charged: a call whose request id is known goes on, whatever the limits or their server say.
"""

from collections.abc import Callable, Sequence

from service_kit.errors import InvalidArgumentError, QuotaExceededError, UnavailableError
from service_kit.ids import RequestId
from service_kit.logging import get_logger
from state_store.ports import GenerationStore
from state_store.quota.errors import LimitReachedError
from state_store.quota.port import QuotaCharge, QuotaKind, QuotaPort, QuotaScope, QuotaStanding, QuotaSubject
from state_store.tenants import ApiKey

Metadata = tuple[tuple[str, str], ...]
_NAMES = {
    QuotaKind.REQUESTS_PER_MINUTE: "requests-per-minute",
    QuotaKind.TOKENS_PER_MINUTE: "tokens-per-minute",
    QuotaKind.MAX_CONCURRENT: "concurrent",
    QuotaKind.TOKENS_PER_DAY: "tokens-per-day",
    QuotaKind.TOKENS_PER_MONTH: "tokens-per-month",
}
_OF_TOKENS = (QuotaKind.TOKENS_PER_MINUTE, QuotaKind.TOKENS_PER_DAY, QuotaKind.TOKENS_PER_MONTH)

_log = get_logger()


class CallQuota:
    """The quota of one call. Mutable state: whether the call attaches, and what its limits were when last asked."""

    def __init__(
        self,
        *,
        quota: QuotaPort,
        store: GenerationStore,
        key: ApiKey,
        request_id: RequestId | None,
        tell: Callable[[Metadata], None],
    ) -> None:
        """`request_id` is the one that the client named, if any; `tell` gets the metadata whenever there is newer one."""
        self._quota = quota
        self._store = store
        self._subject = QuotaSubject(
            tenant_id=key.tenant.tenant_id,
            key_id=key.key_id,
            tenant_limits=key.tenant.limits,
            key_limits=key.limits,
        )
        self._request_id = request_id
        self._tell = tell
        self._attaches = False
        self.metadata: Metadata = ()

    async def is_known(self) -> bool:
        """Whether the call will attach; costs a look into the store if the client named a request id."""
        if self._request_id is None:
            return False
        return await self._store.find_by_request_id(self._subject.tenant_id, self._request_id) is not None

    async def look(self) -> None:
        """Refuses what has no place, before anything is done for it. Raises QuotaExceededError, UnavailableError."""
        try:
            standing = await self._quota.look(self._subject)
        except (QuotaExceededError, UnavailableError) as error:
            await self._attach_or_raise(error)
        else:
            self._take(standing)

    async def reserve(self, charge: QuotaCharge) -> bool:
        """Whether anything is reserved: nothing is for a call that attaches. Raises as `look` does, and
        InvalidArgumentError for what no waiting makes fit."""
        if self._attaches:
            return False
        try:
            self._check_possible(charge)
            standing = await self._quota.reserve(charge, self._subject)
        except (InvalidArgumentError, QuotaExceededError, UnavailableError) as error:
            await self._attach_or_raise(error)
            return False
        self._take(standing)
        return True

    async def release(self, charge: QuotaCharge) -> None:
        """Gives the reservation back unless its generation was committed."""
        try:
            await self._quota.release_many([charge])
        except UnavailableError as error:
            _log.warning("quota_release_left_to_lease", generation_id=charge.generation_id, error=str(error))

    async def _attach_or_raise(self, error: InvalidArgumentError | QuotaExceededError | UnavailableError) -> None:
        if isinstance(error, LimitReachedError):
            self._take(error.standing)
        if not await self.is_known():
            raise error
        self._attaches = True

    def _check_possible(self, charge: QuotaCharge) -> None:
        owners = (
            (QuotaScope.TENANT, self._subject.tenant_limits),
            (QuotaScope.KEY, self._subject.key_limits),
        )
        for scope, limits in owners:
            for kind in _OF_TOKENS:
                limit: int | None = getattr(limits, kind.value)
                if limit is not None and charge.tokens > limit:
                    raise InvalidArgumentError(
                        "spec.sampling.max_output_tokens",
                        f"with the {charge.prompt_tokens} tokens of the prompt the request may need {charge.tokens}, and"
                        f" this {scope.value}'s {kind.value} is {limit}",
                        metadata={"limit": str(limit), "kind": kind.value, "scope": scope.value},
                    )

    def _take(self, standing: Sequence[QuotaStanding]) -> None:
        self.metadata = standing_metadata(standing)
        self._tell(self.metadata)


def standing_metadata(standing: Sequence[QuotaStanding]) -> Metadata:
    """Three entries per kind of limit, for the tighter of tenant and key."""
    tightest: dict[QuotaKind, QuotaStanding] = {}
    for each in standing:
        known = tightest.get(each.kind)
        if known is None or (each.remaining, each.limit) < (known.remaining, known.limit):
            tightest[each.kind] = each
    entries: list[tuple[str, str]] = []
    for kind, each in tightest.items():
        name, seconds = _NAMES[kind], -(-each.reset.total_seconds() // 1)
        entries.append((f"x-ratelimit-limit-{name}", str(each.limit)))
        entries.append((f"x-ratelimit-remaining-{name}", str(each.remaining)))
        entries.append((f"x-ratelimit-reset-{name}", str(int(seconds))))
    return tuple(entries)
