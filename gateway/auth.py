"""Who calls: API keys from metadata to tenants."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from service_kit.api_key import PresentedKey, parse_api_key
from service_kit.errors import UnauthenticatedError
from state_store.tenant_store import KeyStore
from state_store.tenants import ApiKey

_CACHE_TTL = timedelta(seconds=5)
_MAX_CACHED = 10_000
_MESSAGE = "a valid API key is required in the metadata entry `authorization: Bearer <key>`"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cached:
    key: ApiKey | None
    fetched_at: datetime


class Authenticator:
    """Proves API keys against the store. Mutable state: a cache by prefix, 5 s and 10,000 entries, misses included.

    Only what the store says is cached; the secret, expiry and revocation are checked on every call, so a cached entry
    lets a revoked key live for at most 5 s. Calls that miss the same prefix at once share one look-up.
    """

    def __init__(self, keys: KeyStore, *, now: Callable[[], datetime]) -> None:
        self._keys = keys
        self._now = now
        self._cache: OrderedDict[str, _Cached] = OrderedDict()
        self._lookups: dict[str, asyncio.Task[ApiKey | None]] = {}

    async def authenticate(self, metadata: Iterable[tuple[str, str | bytes]]) -> ApiKey:
        """The key behind the call. Raises UnauthenticatedError, and StoreUnavailableError when it cannot be checked."""
        presented = _presented_key(metadata)
        key = await self._find(presented.prefix)
        if key is None or not presented.is_proven_by(key.key_hash) or not self._is_in_force(key):
            raise UnauthenticatedError(_MESSAGE)
        return key

    def _is_in_force(self, key: ApiKey) -> bool:
        if key.revoked_at is not None or key.tenant.disabled_at is not None:
            return False
        return key.expires_at is None or self._now() < key.expires_at

    async def _find(self, prefix: str) -> ApiKey | None:
        cached = self._cache.get(prefix)
        if cached is not None and self._now() - cached.fetched_at < _CACHE_TTL:
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


def _presented_key(metadata: Iterable[tuple[str, str | bytes]]) -> PresentedKey:
    for name, value in metadata:
        if name == "authorization" and isinstance(value, str):
            scheme, _, text = value.partition(" ")
            presented = parse_api_key(text.strip()) if scheme.lower() == "bearer" else None
            if presented is not None:
                return presented
    raise UnauthenticatedError(_MESSAGE)
