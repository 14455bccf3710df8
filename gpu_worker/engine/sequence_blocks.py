"""The blocks of sequences: what is found of one, what it gets, publishes and gives back. Pure."""

from collections.abc import Iterable

from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.engine.in_flight import InFlightBlocks
from gpu_worker.engine.kv_memory import KvMemory
from gpu_worker.engine.sequence import Sequence, StepPlan
from service_kit.prefix_hash import extend_block_hashes

_HASH_STRIDE = 16


class SequenceBlocks:
    """Writes the block fields of sequences; keeps memory and in-flight table in step with them."""

    def __init__(self, *, pool: BlockPool, num_host_blocks: int) -> None:
        self._pool = pool
        self._in_flight = InFlightBlocks()
        self.memory = KvMemory(pool=pool, num_host_blocks=num_host_blocks)

    def find(self, sequence: Sequence) -> list[int | None]:
        """Where the first blocks of a waiting sequence are; see `KvMemory.find`. Hashes little more than is found."""
        found = self.memory.find(sequence.block_hashes)
        while len(found) == len(sequence.block_hashes) and self._hash_more(sequence):
            found += self.memory.find(sequence.block_hashes[len(found) :])
        return found

    def num_found_tokens(self, sequence: Sequence, found: list[int | None]) -> int:
        """Tokens that need not be computed; the last one always is, because its row is sampled."""
        return min(len(found) * self._pool.block_size, sequence.num_tokens - 1)

    def starts_to_wait(self, sequence: Sequence, found: list[int | None]) -> bool:
        """Whether the block behind those found is on its way, computed by the same or a higher class.

        It waits for the last block in a row that is, so that a herd behind one prefix is looked up once, not per block.
        """
        sequence.awaited_hash = None
        index = len(found)
        while index < len(sequence.block_hashes) or self._hash_more(sequence):
            block_hash = sequence.block_hashes[index]
            if not self._in_flight.is_coming(block_hash, sequence.priority):
                break
            sequence.awaited_hash = block_hash
            index += 1
        return sequence.awaited_hash is not None

    def still_waits(self, sequence: Sequence) -> bool:
        """Whether the block that it waits for, if any, is still on its way."""
        awaited = sequence.awaited_hash
        if awaited is None:
            return False
        if not self.memory.is_findable(awaited) and self._in_flight.is_coming(awaited, sequence.priority):
            return True
        sequence.awaited_hash = None
        return False

    def attach(self, sequence: Sequence, found: list[int | None], *, is_last_private: bool) -> None:
        """Gives a sequence the blocks found of it; it starts to compute the rest."""
        self._hash(sequence, sequence.num_tokens // self._pool.block_size)
        sequence.block_table = self.memory.acquire(sequence.block_hashes, found, is_last_private=is_last_private)
        sequence.num_computed_tokens = self.num_found_tokens(sequence, found)
        sequence.num_published_blocks = len(found) - is_last_private
        sequence.num_admitted_tokens = sequence.num_tokens
        self._in_flight.start(sequence)

    def grow(self, sequence: Sequence, num_blocks: int) -> None:
        """So many blocks more. Raises OutOfBlocksError."""
        sequence.block_table += self.memory.allocate(num_blocks)

    def trim(self, sequence: Sequence) -> None:
        """Gives up blocks behind the computed tokens: nothing of what was proposed for them holds."""
        num_blocks = self._pool.num_blocks_for(sequence.num_computed_tokens)
        surplus = sequence.block_table[num_blocks:]
        if surplus:
            self.memory.release(surplus)
            del sequence.block_table[num_blocks:]

    def detach(self, sequence: Sequence) -> None:
        """Takes a sequence's blocks; their published content stays findable."""
        self._in_flight.stop(sequence)
        self.memory.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = sequence.num_published_blocks = 0

    def disown(self, sequence: Sequence) -> None:
        """Makes the content of a sequence's blocks unfindable, because it may be wrong."""
        for block_hash in sequence.block_hashes[: sequence.num_published_blocks]:
            self.memory.forget(block_hash)

    def publish(self, sequence: Sequence) -> None:
        """Makes the blocks findable that became full, with all their tokens computed."""
        if sequence.prefix_root is None:
            return
        num_known = len(sequence.block_hashes)
        num_full = sequence.num_computed_tokens // self._pool.block_size
        self._hash(sequence, num_full)
        for index in range(sequence.num_published_blocks, num_full):
            block_hash = sequence.block_hashes[index]
            if index < num_known:
                self._in_flight.finish(sequence, block_hash)
            self.memory.publish(sequence.block_table[index], block_hash)
        sequence.num_published_blocks = num_full

    def check_integrity(self, sequences: Iterable[Sequence], plan: StepPlan) -> None:
        """Raises BlockAccountingError or AssertionError unless these are all sequences and `plan` writes only their own.

        A running sequence holds exactly the blocks that its computed and planned tokens need.
        """
        by_id = {sequence.sequence_id: sequence for sequence in sequences}
        self.memory.check_integrity(sequence.block_table for sequence in by_id.values())
        self._in_flight.check_integrity(sequence for sequence in by_id.values() if sequence.block_table)
        ends = {planned.sequence_id: planned.context_length for planned in plan.sequences}
        for sequence_id, sequence in by_id.items():
            end = ends.get(sequence_id, sequence.num_computed_tokens)
            assert len(sequence.block_table) == self._pool.num_blocks_for(end), "blocks and tokens disagree"
        for planned in plan.sequences:
            if planned.sequence_id in by_id:
                for block in planned.block_table[planned.start // self._pool.block_size :]:
                    assert self._pool.num_references(block) == 1, f"the plan writes shared block {block}"
                    assert not self.memory.is_named(block), f"the plan writes cached block {block}"

    def _hash_more(self, sequence: Sequence) -> bool:
        """Hashes some more of the known full blocks; False when all are."""
        num_known = len(sequence.block_hashes)
        self._hash(sequence, min(num_known + _HASH_STRIDE, sequence.num_tokens // self._pool.block_size))
        return len(sequence.block_hashes) > num_known

    def _hash(self, sequence: Sequence, num_blocks: int) -> None:
        """Hashes the first blocks of a sequence that were not hashed yet."""
        if sequence.prefix_root is not None:
            size = self._pool.block_size
            hashes, token_ids = sequence.block_hashes, sequence.token_ids
            extend_block_hashes(sequence.prefix_root, hashes, token_ids, size, num_blocks=num_blocks)
