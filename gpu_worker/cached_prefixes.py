"""Which prefix blocks the engine has cached, and what of it a scheduler has not heard yet. Pure."""

from collections.abc import Iterable

from gpu_worker.engine.port import CacheChanges
from service_kit.prefix_hash import MAX_ANNOUNCED_DIGESTS


class PrefixFeed:
    """What one stream has still to say. Everything counts as added before its first message; what came and went between two
    messages is never said."""

    def __init__(self, digests: Iterable[int] = ()) -> None:
        self._added: dict[int, None] = dict.fromkeys(digests)
        self._removed: dict[int, None] = {}

    def note_added(self, digest: int) -> None:
        if digest in self._removed:
            del self._removed[digest]
        else:
            self._added[digest] = None

    def note_removed(self, digest: int) -> None:
        if digest in self._added:
            del self._added[digest]
        else:
            self._removed[digest] = None

    def take(self) -> CacheChanges:
        """The changes since the last call."""
        changes = CacheChanges(added=tuple(self._added), removed=tuple(self._removed))
        self._added.clear()
        self._removed.clear()
        return changes


class CachedPrefixes:
    """Owner of the set of cached digests of one engine process, and of the feed of the current stream.

    It holds what the engine's cache holds, `max_digests` at most: beyond that the oldest is withdrawn, which costs a
    scheduler a good place and nothing else.
    """

    def __init__(self, max_digests: int = MAX_ANNOUNCED_DIGESTS) -> None:
        if max_digests < 1:
            raise ValueError("max_digests must be at least 1")
        self._max_digests = max_digests
        self._digests: dict[int, None] = {}
        self._feed = PrefixFeed()

    def __len__(self) -> int:
        return len(self._digests)

    def begin_feed(self) -> PrefixFeed:
        """A feed that begins with everything; an earlier one hears no more."""
        self._feed = PrefixFeed(self._digests)
        return self._feed

    def apply(self, changes: CacheChanges) -> None:
        """Books what a step changed: first what left, then what came. What is known or unknown already changes nothing."""
        for digest in changes.removed:
            if digest in self._digests:
                self._remove(digest)
        for digest in changes.added:
            if digest in self._digests:
                continue
            if len(self._digests) >= self._max_digests:
                self._remove(next(iter(self._digests)))
            self._digests[digest] = None
            self._feed.note_added(digest)

    def _remove(self, digest: int) -> None:
        del self._digests[digest]
        self._feed.note_removed(digest)
