"""What a worker says of itself between its tokens: how full it is and which prefixes it has cached. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from service_kit.prefix_hash import MAX_ANNOUNCED_DIGESTS
from state_store.model import PriorityClass

BlocksByClass = tuple[int, int, int]
"""Indexed by the rank of the priority class."""
EXPECTED_FOR_S = 10.0
"""How long a prefix is believed to come that was sent to a worker and that it has not announced: longer than a prefill."""
MAX_EXPECTED_DIGESTS = 1 << 16
RECENT_HALF_LIFE_S = 10.0
"""How fast work that was given to a worker is forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLoad:
    """A worker's latest load report. `room_blocks` are blocks that a new attempt of each class could get."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_cached_blocks: int = 0
    room_blocks: BlocksByClass = (0, 0, 0)
    is_draining: bool = False


def room_by_class(reported: Sequence[int], *, num_free_blocks: int) -> BlocksByClass:
    """The reported room; a worker that reports none has what is free, in every class."""
    if not reported:
        return num_free_blocks, num_free_blocks, num_free_blocks
    if len(reported) != len(PriorityClass):
        raise ValueError(f"room_blocks has {len(reported)} entries, there are {len(PriorityClass)} classes")
    interactive, standard, batch = reported
    return interactive, standard, batch


class RecentWork:
    """Tokens that one worker was given to compute, of which those of some time ago count for less and less."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._at_s = 0.0

    def add(self, tokens: int, *, now_s: float) -> None:
        self._tokens = self.at(now_s) + tokens
        self._at_s = now_s

    def at(self, now_s: float) -> float:
        return self._tokens * math.exp2((self._at_s - now_s) / RECENT_HALF_LIFE_S)


class ExpectedPrefixes:
    """Owner of the digests that one worker will have cached when it has computed what was sent to it: until it announces
    them, or for some seconds. Of more than `max_digests` the oldest are forgotten, which costs a detour and nothing else."""

    def __init__(self, max_digests: int = MAX_EXPECTED_DIGESTS) -> None:
        self._max_digests = max_digests
        self._until_s: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, digests: Iterable[int], *, now_s: float) -> None:
        for digest in digests:
            self._until_s.pop(digest, None)  # to the end of the order of insertion, which is that of the ends
            self._until_s[digest] = now_s + EXPECTED_FOR_S
        self._forget_over(now_s)

    def forget(self, digest: int) -> None:
        self._until_s.pop(digest, None)

    def has(self, digest: int, *, now_s: float) -> bool:
        return self._until_s.get(digest, now_s) > now_s

    def _forget_over(self, now_s: float) -> None:
        num_extra = len(self._until_s) - self._max_digests
        over = []
        for index, (digest, until_s) in enumerate(self._until_s.items()):
            if index >= num_extra and until_s > now_s:
                break
            over.append(digest)
        for digest in over:
            del self._until_s[digest]


class PrefixSet:
    """Owner of the digests that one worker has cached, as far as it has said, and of those that it soon will have: what was
    sent to it and not announced yet. At most `max_digests` of the former: what comes beyond is not kept, which costs a
    detour and nothing else."""

    def __init__(self, max_digests: int = MAX_ANNOUNCED_DIGESTS) -> None:
        self._max_digests = max_digests
        self._digests: set[int] = set()
        self._expected = ExpectedPrefixes()

    def __len__(self) -> int:
        return len(self._digests)

    def reset(self, digests: Iterable[int]) -> None:
        """A new stream begins: the worker has these and no others."""
        self._digests.clear()
        self.change(added=digests, removed=())

    def change(self, *, added: Iterable[int], removed: Iterable[int]) -> None:
        self._digests.difference_update(removed)
        for digest in added:
            self._expected.forget(digest)
            if len(self._digests) >= self._max_digests:
                return
            self._digests.add(digest)

    def expect(self, digests: Iterable[int], *, now_s: float) -> None:
        """A prompt with these blocks was sent to the worker."""
        self._expected.add((digest for digest in digests if digest not in self._digests), now_s=now_s)

    def has(self, digest: int, *, now_s: float) -> bool:
        """Whether the worker has the block, or will have it soon."""
        return digest in self._digests or self._expected.has(digest, now_s=now_s)

    def num_cached_blocks(self, digests: Sequence[int]) -> int:
        """Length of the leading run of `digests`, those of a prompt's blocks in order, that the worker has."""
        for index, digest in enumerate(digests):
            if digest not in self._digests:
                return index
        return len(digests)
