"""The simulated engine's prefix cache: which blocks can be found by their hash. Pure."""

from collections import OrderedDict
from collections.abc import Sequence

from gpu_worker.cached_prefixes import PrefixFeed
from gpu_worker.engine.port import CacheChanges
from service_kit.prefix_hash import BlockHash, digest_of


class SimulatedPrefixCache:
    """Owner of the cached blocks: those that sequences hold, and unused ones, of which the longest unused goes first.

    Blocks are counted in the batch, where two holders of one hash count twice: what is cached never exceeds the memory.
    """

    def __init__(self) -> None:
        self._num_holders: dict[BlockHash, int] = {}
        self._unused: OrderedDict[BlockHash, None] = OrderedDict()
        self._feed = PrefixFeed()

    def __len__(self) -> int:
        return len(self._num_holders) + len(self._unused)

    @property
    def num_unused(self) -> int:
        return len(self._unused)

    def num_found(self, hashes: Sequence[BlockHash]) -> int:
        """Length of the leading run that is cached."""
        for index, each in enumerate(hashes):
            if each not in self._num_holders and each not in self._unused:
                return index
        return len(hashes)

    def hold(self, hashes: Sequence[BlockHash]) -> None:
        """One more sequence has these blocks: cached ones, or ones it has just computed."""
        for each in hashes:
            if each in self._unused:
                del self._unused[each]
            elif each not in self._num_holders:
                self._feed.note_added(digest_of(each))
            self._num_holders[each] = self._num_holders.get(each, 0) + 1

    def release(self, hashes: Sequence[BlockHash]) -> None:
        """One sequence less has these blocks. The end of a prefix is of no use without its beginning, so it goes first."""
        for each in reversed(hashes):
            self._num_holders[each] -= 1
            if not self._num_holders[each]:
                del self._num_holders[each]
                self._unused[each] = None

    def shrink(self, max_unused: int) -> None:
        """Forgets the longest unused blocks until no more than `max_unused` are left."""
        while len(self._unused) > max_unused:
            each, _ = self._unused.popitem(last=False)
            self._feed.note_removed(digest_of(each))

    def take_changes(self) -> CacheChanges:
        """What came and went since the last call."""
        return self._feed.take()
