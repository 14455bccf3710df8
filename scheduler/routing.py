"""Which session gets an entry: where the least is left to compute before it, its own prompt included. Pure.

The cost of a session for an entry, in tokens: of the entry what is not cached there, of what was given to it before what is
not computed yet, and the slots in use. The cached part is the longest run of leading blocks that the session announced, or
that an earlier assignment will have left there. (After Preble, arXiv:2407.00023, and the cost of Dynamo's KV router.)

Without load that would send everything that begins alike to one session. So one that has lately been given clearly more
than the others costs more, until some of it has moved.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler.queue.port import ByClass
from service_kit.ids import SessionId
from service_kit.prefix_hash import block_hashes, digest_of, prefix_root
from state_store.model import PriorityClass

BATCH_COST_TOKENS = 2048
"""What a full batch costs a newcomer beside an empty one, in tokens of prefill: each of its own steps takes longer."""
EVEN_SHARE = 1.1
"""Of the mean recent work of all candidates; who was given more, and more than the slack, is to get less."""
UNEVEN_SLACK_TOKENS = 256
"""So much more is nothing to talk of: a few conversations stay where they are."""
UNEVEN_COST = 2.0
"""What each token beyond that costs."""
LOWER_CLASS_SHARE = 0.5
"""Attempts of lower classes count for less: they are computed later, and give up their memory."""

Digests = tuple[int, ...]
"""Of a prompt's full blocks, in order."""


class KnownPrefixes(Protocol):
    """What one session has cached, or soon will have."""

    def has(self, digest: int, *, now_s: float) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A session as the router sees it; room as in the queue's `SessionRoom`, but for all of it.

    `num_attempts` are all that were given to it and have not ended, `tokens_to_fill` what those that have made no token
    still have to compute, both by class.
    """

    session_id: SessionId
    block_size: int
    max_running: int
    max_entries: ByClass
    max_tokens: ByClass
    max_charged: int
    num_attempts: ByClass
    tokens_to_fill: ByClass
    recent_tokens: float
    """Given to it to compute lately."""
    prefixes: KnownPrefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class Routable:
    """A popped entry: the session whose room the queue counted it against, where else it may not go, its prompt's digests."""

    session_id: SessionId
    kept: frozenset[SessionId] = frozenset()
    """Sessions that are kept free for another entry."""
    priority_class: PriorityClass
    max_tokens: int
    is_charged: bool
    digests: Mapping[int, Digests]
    """By block size; empty where nothing is known about the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where an entry goes, and how much of it is expected to be cached there."""

    session_id: SessionId
    cached_tokens: int
    digests: Digests


def prompt_digests(
    token_ids: Sequence[int], *, fingerprint: str, tenant_salt: str, block_sizes: set[int]
) -> dict[int, Digests]:
    """As the engines compute and announce them, for each block size."""
    root = prefix_root(model_fingerprint=fingerprint, tenant_salt=tenant_salt)
    return {size: tuple(map(digest_of, block_hashes(root, token_ids, size))) for size in block_sizes}


def route(items: Sequence[Routable], candidates: Sequence[Candidate], *, now_s: float) -> list[Route]:
    """A session for each item, in order. The queue's own choice is always among them, so that all find their place: what
    is moved must fit beside everything that is counted against its new session."""
    places = {candidate.session_id: _Place(candidate, now_s) for candidate in candidates}
    for item in items:
        places[item.session_id].count(item, +1)
    routes = []
    for item in items:
        places[item.session_id].count(item, -1)
        fitting = [
            place
            for session_id, place in places.items()
            if session_id == item.session_id or (session_id not in item.kept and place.fits(item))
        ]
        even = EVEN_SHARE * sum(place.recent_tokens for place in places.values()) / len(places)
        best = min(fitting, key=lambda place: (place.cost(item, even), place.recent_tokens))
        best.count(item, +1)
        routes.append(best.take(item))
    return routes


class _Place:
    """What one session has got so far in this round."""

    def __init__(self, candidate: Candidate, now_s: float) -> None:
        self._candidate = candidate
        self._now_s = now_s
        self._num_entries = 0
        self._num_tokens = 0
        self._num_charged = 0
        self._num_attempts = list(candidate.num_attempts)
        self._tokens_to_fill = list(candidate.tokens_to_fill)
        self._coming: set[int] = set()
        self.recent_tokens = candidate.recent_tokens

    def count(self, item: Routable, sign: int) -> None:
        self._num_entries += sign
        self._num_tokens += sign * item.max_tokens
        self._num_charged += sign * item.is_charged

    def fits(self, item: Routable) -> bool:
        rank, limits = item.priority_class.rank, self._candidate
        return (
            self._num_entries < limits.max_entries[rank]
            and self._num_tokens + item.max_tokens <= limits.max_tokens[rank]
            and self._num_charged + item.is_charged <= max(limits.max_charged, self._num_charged)
        )

    def cost(self, item: Routable, even: float) -> float:
        """In tokens. `even` is the recent work that nobody need be above."""
        rank = item.priority_class.rank
        slots = _weighted(self._num_attempts, rank) / self._candidate.max_running
        uncached = item.max_tokens - self._cached_tokens(item)
        uneven = max(0.0, self.recent_tokens - even - UNEVEN_SLACK_TOKENS)
        return uncached + _weighted(self._tokens_to_fill, rank) + BATCH_COST_TOKENS * slots + UNEVEN_COST * uneven

    def take(self, item: Routable) -> Route:
        rank, digests = item.priority_class.rank, self._digests(item)
        cached_tokens = self._cached_tokens(item)
        self._num_attempts[rank] += 1
        self._tokens_to_fill[rank] += item.max_tokens - cached_tokens
        self._coming.update(digests)
        self.recent_tokens += item.max_tokens - cached_tokens
        return Route(session_id=self._candidate.session_id, cached_tokens=cached_tokens, digests=digests)

    def _digests(self, item: Routable) -> Digests:
        return item.digests.get(self._candidate.block_size, ())

    def _cached_tokens(self, item: Routable) -> int:
        """Of the leading run of blocks; the last token is computed in any case."""
        num_blocks = 0
        for digest in self._digests(item):
            if digest not in self._coming and not self._candidate.prefixes.has(digest, now_s=self._now_s):
                break
            num_blocks += 1
        return min(num_blocks * self._candidate.block_size, item.max_tokens - 1)


def _weighted(by_class: Sequence[int], rank: int) -> float:
    return sum(by_class[: rank + 1]) + LOWER_CLASS_SHARE * sum(by_class[rank + 1 :])
