"""Which prefix hashes became findable and which stopped being so, for those who route by cached prefix. Pure."""

from itertools import islice

from gpu_worker.engine.port import CacheChanges
from service_kit.prefix_hash import BlockHash, digest_of

MAX_CHANGES_PER_REPORT = 4096
_NO_CHANGES = CacheChanges()


class CacheChangeLog:
    """The net difference between what was reported and what is findable.

    A hash that came and went in between is no change, so the log never holds more entries than two full caches; what
    does not fit into one report stays for the next.
    """

    def __init__(self) -> None:
        self._is_added_by_hash: dict[BlockHash, bool] = {}
        self._num_findable = 0

    @property
    def num_findable(self) -> int:
        return self._num_findable

    def add(self, block_hash: BlockHash) -> None:
        """The hash became findable."""
        self._num_findable += 1
        self._record(block_hash, is_added=True)

    def remove(self, block_hash: BlockHash) -> None:
        """The hash stopped being findable."""
        self._num_findable -= 1
        self._record(block_hash, is_added=False)

    def take(self) -> CacheChanges:
        """The oldest changes that were not taken yet."""
        if not self._is_added_by_hash:
            return _NO_CHANGES
        taken = list(islice(self._is_added_by_hash.items(), MAX_CHANGES_PER_REPORT))
        for block_hash, _ in taken:
            del self._is_added_by_hash[block_hash]
        return CacheChanges(
            added=tuple(digest_of(block_hash) for block_hash, is_added in taken if is_added),
            removed=tuple(digest_of(block_hash) for block_hash, is_added in taken if not is_added),
        )

    def _record(self, block_hash: BlockHash, *, is_added: bool) -> None:
        if self._is_added_by_hash.pop(block_hash, is_added) == is_added:
            self._is_added_by_hash[block_hash] = is_added
