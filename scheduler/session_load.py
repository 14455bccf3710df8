"""What a worker says of itself between its tokens: how full it is and which prefixes it has cached. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from service_kit.prefix_hash import MAX_ANNOUNCED_DIGESTS
from state_store.model import PriorityClass

BlocksByClass = tuple[int, int, int]
"""Indexed by the rank of the priority class."""


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


class PrefixSet:
    """Owner of the digests that one worker has cached, as far as it has said; at most `max_digests`: what comes beyond is
    not kept, which costs a detour and nothing else."""

    def __init__(self, max_digests: int = MAX_ANNOUNCED_DIGESTS) -> None:
        self._max_digests = max_digests
        self._digests: set[int] = set()

    def __len__(self) -> int:
        return len(self._digests)

    def reset(self, digests: Iterable[int]) -> None:
        """A new stream begins: the worker has these and no others."""
        self._digests.clear()
        self.change(added=digests, removed=())

    def change(self, *, added: Iterable[int], removed: Iterable[int]) -> None:
        self._digests.difference_update(removed)
        for digest in added:
            if len(self._digests) >= self._max_digests:
                return
            self._digests.add(digest)

    def num_cached_blocks(self, digests: Sequence[int]) -> int:
        """Length of the leading run of `digests`, those of a prompt's blocks in order, that the worker has."""
        for index, digest in enumerate(digests):
            if digest not in self._digests:
                return index
        return len(digests)
