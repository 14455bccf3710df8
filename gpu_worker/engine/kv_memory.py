"""KV memory as the step scheduler sees it: blocks, the content that can be found in them, and the host tier. Pure.

While a plan is made, block moves collect here; `take_moves` ends the plan. The moves are executed before the plan
computes: to the host, from the host, duplicated. Why that is right in every interleaving: content that is saved was
complete before the plan, because blocks loaded in the plan are never saved (the host has them); a host slot that the
plan uses gets no other content in it; the source of a copy is held until the plan is made; and a block that is taken
again within the plan loses the move that was to fill it.
"""

from collections.abc import Iterable, Sequence

from gpu_worker.engine.block_pool import BlockAccountingError, BlockPool
from gpu_worker.engine.cache_changes import CacheChangeLog
from gpu_worker.engine.host_tier import HostTier
from gpu_worker.engine.port import CacheChanges
from gpu_worker.engine.prefix_cache import PrefixCache
from gpu_worker.engine.sequence import NO_MOVES, BlockMoves
from service_kit.prefix_hash import BlockHash


class KvMemory:
    """Device blocks that can be found by prefix hash, over an optional tier of host blocks."""

    def __init__(self, *, pool: BlockPool, num_host_blocks: int = 0) -> None:
        self._pool = pool
        self._cache = PrefixCache(num_blocks=pool.num_blocks)
        self._host = HostTier(num_slots=num_host_blocks)
        self._changes = CacheChangeLog()
        self._saves: list[tuple[int, int]] = []
        self._slot_by_loaded_block: dict[int, int] = {}
        self._source_by_copy: dict[int, int] = {}
        self._pinned: list[int] = []
        self.num_blocks_to_host = 0
        """Blocks saved since the start."""
        self.num_blocks_from_host = 0
        """Blocks loaded since the start."""

    @property
    def num_cached_blocks(self) -> int:
        """Contents that can be found now, host tier included."""
        return self._changes.num_findable

    def is_findable(self, block_hash: BlockHash) -> bool:
        return block_hash in self._cache or block_hash in self._host

    def find(self, block_hashes: Sequence[BlockHash]) -> list[int | None]:
        """Where the first blocks of a sequence are, up to the first that is nowhere; None is the host tier."""
        found: list[int | None] = []
        for block_hash in block_hashes:
            block = self._cache.find(block_hash)
            if block is None and block_hash not in self._host:
                break
            found.append(block)
        return found

    def acquire(
        self, block_hashes: Sequence[BlockHash], found: Sequence[int | None], *, is_last_private: bool
    ) -> list[int]:
        """Holds what `find` found, loading from the host what is not on the device.

        With `is_last_private` the last one becomes a copy that nobody else holds or finds, so that it may be written.
        Needs as many free blocks as there are to load and to copy. Found blocks and host slots are held before any
        block is taken, since taking one may evict another and save it over a third.
        """
        for block in found:
            if block is not None:
                self._pool.share(block)
        slots = [self._host.use(block_hashes[index]) for index, block in enumerate(found) if block is None]
        is_last_copied = is_last_private and found[-1] is not None
        fresh = iter(self.allocate(len(slots) + is_last_copied))
        table: list[int] = []
        for index, block in enumerate(found):
            is_private = is_last_private and index == len(found) - 1
            table.append(next(fresh) if block is None or is_private else block)
            if block is None:
                self._slot_by_loaded_block[table[-1]] = slots.pop(0)
                if not is_private:
                    self.publish(table[-1], block_hashes[index])
            elif is_private:
                self._source_by_copy[table[-1]] = block
                self._pinned.append(block)
        return table

    def allocate(self, count: int) -> list[int]:
        """Takes free blocks, evicting content if need be. Raises OutOfBlocksError and then takes none."""
        blocks = self._pool.allocate(count)
        for block in blocks:
            self._slot_by_loaded_block.pop(block, None)
            self._source_by_copy.pop(block, None)
            block_hash = self._cache.take_name(block)
            if block_hash is not None:
                self._save(block, block_hash)
        return blocks

    def publish(self, block: int, block_hash: BlockHash) -> None:
        """Makes the content of a held block findable; if another block has that content, this one stays private."""
        if self._cache.give_name(block, block_hash):
            self._pool.keep(block)
            if block_hash not in self._host:
                self._changes.add(block_hash)

    def forget(self, block_hash: BlockHash) -> None:
        """Content that can no longer be found, neither on the device nor in the host tier. Between plans only."""
        block = self._cache.find(block_hash)
        if block is not None:
            self._cache.take_name(block)
            self._pool.forget(block)
        if self._host.discard(block_hash) or block is not None:
            self._changes.remove(block_hash)

    def release(self, block_table: Sequence[int]) -> None:
        """Gives up a sequence's blocks, so that its later blocks are evicted before its earlier ones."""
        self._pool.release(reversed(block_table))

    def take_moves(self) -> BlockMoves:
        """Ends the plan: its moves, which are to be executed before anything else is asked of this object."""
        self._host.finish_plan()
        if not (self._saves or self._slot_by_loaded_block or self._source_by_copy or self._pinned):
            return NO_MOVES
        moves = BlockMoves(
            to_host=tuple(self._saves),
            from_host=tuple((slot, block) for block, slot in self._slot_by_loaded_block.items()),
            duplicated=tuple((source, block) for block, source in self._source_by_copy.items()),
        )
        self.num_blocks_to_host += len(moves.to_host)
        self.num_blocks_from_host += len(moves.from_host)
        self._pool.release(self._pinned)
        for collected in (self._saves, self._slot_by_loaded_block, self._source_by_copy, self._pinned):
            collected.clear()
        return moves

    def drop_unheld(self) -> None:
        """Forgets all content that nobody holds, and the host tier."""
        before = self._findable()
        for block in self._pool.forget_unheld():
            self._cache.take_name(block)
        self._host.clear()
        for block_hash in before - self._cache.hashes():
            self._changes.remove(block_hash)

    def take_changes(self) -> CacheChanges:
        return self._changes.take()

    def is_named(self, block: int) -> bool:
        return self._cache.name_of(block) is not None

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises BlockAccountingError or AssertionError unless all parts agree and `tables` are the only holders."""
        self._pool.check_integrity()
        self._cache.check_integrity()
        self._host.check_integrity()
        assert len(self._findable()) == self._changes.num_findable, "findable contents are miscounted"
        num_holders = [0] * self._pool.num_blocks
        for table in tables:
            for block in table:
                num_holders[block] += 1
        for block, count in enumerate(num_holders):
            if self._pool.num_references(block) != count:
                raise BlockAccountingError(f"block {block} has {count} holders, not {self._pool.num_references(block)}")
            assert self._pool.is_kept(block) == self.is_named(block), f"block {block} keeps content without a name"

    def _save(self, block: int, block_hash: BlockHash) -> None:
        """Moves evicted content to the host, if there is a place for it."""
        if block_hash in self._host:
            self._host.use(block_hash)
            return
        place = self._host.store(block_hash)
        if place is None:
            self._changes.remove(block_hash)
            return
        self._saves.append((block, place.slot))
        if place.lost is not None and place.lost not in self._cache:
            self._changes.remove(place.lost)

    def _findable(self) -> set[BlockHash]:
        return self._cache.hashes() | self._host.hashes()
