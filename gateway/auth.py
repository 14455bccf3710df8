"""Who calls: API keys from metadata to tenants."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeGuard

from gateway.failed_authentication import FailedAuthentication, FailureCounts, peer_of
from gateway.turns import Turns
from service_kit.api_key import PresentedKey, hash_api_key, parse_api_key
from service_kit.errors import QuotaExceededError, Reason, SluiceError, UnauthenticatedError
from service_kit.logging import get_logger
from state_store.tenant_store import KeyStore
from state_store.tenants import ApiKey

_CACHE_TTL = timedelta(seconds=5)
_MAX_CACHED = 10_000
_MESSAGE = "a valid API key is required in the metadata entry `authorization: Bearer <key>`"
_LIMITED_MESSAGE = "too many keys from this address were not valid; only those in use are taken"
_MIN_RETRY_AFTER = timedelta(milliseconds=100)
_DUMMY_HASH = hash_api_key("no key has this hash")

_log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cached:
    key: ApiKey | None
    fetched_at: datetime


class Authenticator:
    """Proves API keys against the store. Mutable state: a cache by prefix, 5 s and 10,000 entries, misses included; and
    the failures by peer.

    Only what the store says is cached; the secret, expiry and revocation are checked on every call, so a cached entry
    lets a revoked key live for at most 5 s. Calls that miss the same prefix at once share one look-up.

    Whatever is wrong with a key, the answer is the same, and so is the work from the look-up on: an unknown prefix is
    compared as well. A peer with too many failures gets look-ups at a trickle; a key in force whose secret is that of a
    cached entry, if only an old one, is no guess and goes on as ever.
    """

    def __init__(
        self,
        keys: KeyStore,
        *,
        now: Callable[[], datetime],
        clock: Callable[[], float] = time.monotonic,
        failures: FailedAuthentication | None = None,
    ) -> None:
        """`clock` is monotonic seconds."""
        self._keys = keys
        self._now = now
        self._clock = clock
        self._failures = failures or FailedAuthentication()
        self._turns = Turns(self._failures.limits.max_failures)
        self._cache: OrderedDict[str, _Cached] = OrderedDict()
        self._lookups: dict[str, asyncio.Task[ApiKey | None]] = {}

    @property
    def failures(self) -> FailureCounts:
        return self._failures.counts

    async def authenticate_call(self, context: Any) -> ApiKey:
        """As `authenticate`, for a call on a gRPC server."""
        return await self.authenticate(context.invocation_metadata() or (), peer=context.peer())

    async def authenticate(self, metadata: Iterable[tuple[str, str | bytes]], *, peer: str) -> ApiKey:
        """The key behind the call. `peer` as gRPC names it.

        Raises UnauthenticatedError, QuotaExceededError (TOO_MANY_BAD_KEYS) for a peer that has failed too often, and
        StoreUnavailableError when the key cannot be checked.
        """
        presented, source = _presented_key(metadata), peer_of(peer)
        key = await (self._find(presented.prefix) if self._is_in_use(presented) else self._try(presented, source))
        is_proven = _is_proven(presented, key)
        if key is None or not is_proven or not self._is_in_force(key):
            raise self._failed(source)
        return key

    def _is_in_use(self, presented: PresentedKey | None) -> TypeGuard[PresentedKey]:
        """Whether it proves itself by what was looked up before, however long ago."""
        cached = self._cache.get(presented.prefix) if presented is not None else None
        key = cached.key if cached is not None else None
        return _is_proven(presented, key) and key is not None and self._is_in_force(key)

    async def _try(self, presented: PresentedKey | None, source: str) -> ApiKey | None:
        """What is to be compared with a key that may be a guess. Raises QuotaExceededError.

        Only look-ups wait for a turn: of many keys that come at once the first failures must count for those behind them.
        """
        cached = self._find_fresh(presented.prefix) if presented is not None else None
        if presented is None or cached is not None:
            if self._failures.is_limited(source, self._clock()):
                raise self._refused(self._failures.limits.lookup_interval)
            return cached.key if cached is not None else None
        async with self._turns.take(source):
            now_s = self._clock()
            wait = self._failures.take_lookup(source, now_s) if self._failures.is_limited(source, now_s) else None
            if wait is not None:
                raise self._refused(wait)
            return await self._find(presented.prefix)

    def _refused(self, wait: timedelta) -> SluiceError:
        self._failures.note_refusal()
        return QuotaExceededError(
            _LIMITED_MESSAGE,
            subject="peer",
            reason=Reason.TOO_MANY_BAD_KEYS,
            retry_after=max(wait, _MIN_RETRY_AFTER),
        )

    def _failed(self, source: str) -> SluiceError:
        if self._failures.note_failure(source, self._clock()):
            counts = self._failures.counts
            _log.warning("authentication_failed", peer=source, failed=counts.failed, refused=counts.refused)
        return UnauthenticatedError(_MESSAGE)

    def _is_in_force(self, key: ApiKey) -> bool:
        if key.revoked_at is not None or key.tenant.disabled_at is not None:
            return False
        return key.expires_at is None or self._now() < key.expires_at

    def _find_fresh(self, prefix: str) -> _Cached | None:
        cached = self._cache.get(prefix)
        return cached if cached is not None and self._now() - cached.fetched_at < _CACHE_TTL else None

    async def _find(self, prefix: str) -> ApiKey | None:
        cached = self._find_fresh(prefix)
        if cached is not None:
            self._cache.move_to_end(prefix)
            return cached.key
        lookup = self._lookups.get(prefix)
        if lookup is None:
            lookup = asyncio.create_task(self._look_up(prefix))
            self._lookups[prefix] = lookup
            lookup.add_done_callback(lambda _: self._lookups.pop(prefix, None))
        # One caller that leaves must not take the answer from the others.
        return await asyncio.shield(lookup)

    async def _look_up(self, prefix: str) -> ApiKey | None:
        fetched_at = self._now()
        key = await self._keys.find_key(prefix)
        self._cache[prefix] = _Cached(key=key, fetched_at=fetched_at)
        self._cache.move_to_end(prefix)
        while len(self._cache) > _MAX_CACHED:
            self._cache.popitem(last=False)
        return key


def _is_proven(presented: PresentedKey | None, key: ApiKey | None) -> bool:
    """Compares in any case, so that the time does not tell whether there is such a key."""
    given = presented if presented is not None else PresentedKey(prefix="", key_hash=hash_api_key(""))
    is_equal = given.is_proven_by(key.key_hash if key is not None else _DUMMY_HASH)
    return is_equal and presented is not None and key is not None


def _presented_key(metadata: Iterable[tuple[str, str | bytes]]) -> PresentedKey | None:
    """The first well-formed key; None: there is none, which is no secret to the caller and costs no look-up."""
    for name, value in metadata:
        if name == "authorization" and isinstance(value, str):
            scheme, _, text = value.partition(" ")
            presented = parse_api_key(text.strip()) if scheme.lower() == "bearer" else None
            if presented is not None:
                return presented
    return None
