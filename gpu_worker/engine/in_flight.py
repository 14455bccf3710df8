"""Blocks that running sequences are about to compute, so that others with the same prefix can wait for them. Pure."""

from collections.abc import Iterable

from gpu_worker.engine.sequence import Sequence
from service_kit.prefix_hash import BlockHash


class InFlightBlocks:
    """Which running sequences compute the block of a hash: full blocks of tokens known when they were taken in.

    Several may compute the same one, when a higher class did not wait for a lower one.
    """

    def __init__(self) -> None:
        self._owners_by_hash: dict[BlockHash, list[Sequence]] = {}

    def start(self, owner: Sequence) -> None:
        """The owner starts to run; it will compute its known blocks that are not published."""
        for block_hash in owner.block_hashes[owner.num_published_blocks :]:
            self._owners_by_hash.setdefault(block_hash, []).append(owner)

    def stop(self, owner: Sequence) -> None:
        """The owner no longer runs."""
        for block_hash in owner.block_hashes[owner.num_published_blocks :]:
            self.finish(owner, block_hash)

    def finish(self, owner: Sequence, block_hash: BlockHash) -> None:
        """The owner computed this block."""
        owners = self._owners_by_hash[block_hash]
        owners.remove(owner)
        if not owners:
            del self._owners_by_hash[block_hash]

    def is_coming(self, block_hash: BlockHash, priority: int) -> bool:
        """Whether a sequence of that class or a higher one computes the block."""
        return any(owner.priority <= priority for owner in self._owners_by_hash.get(block_hash, ()))

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raises AssertionError unless the table is exactly what the running sequences have yet to compute."""
        expected: dict[BlockHash, set[str]] = {}
        for sequence in running:
            for block_hash in sequence.block_hashes[sequence.num_published_blocks :]:
                expected.setdefault(block_hash, set()).add(sequence.sequence_id)
        actual = {
            block_hash: [owner.sequence_id for owner in owners] for block_hash, owners in self._owners_by_hash.items()
        }
        assert expected == {block_hash: set(names) for block_hash, names in actual.items()}, "in-flight blocks disagree"
        assert all(len(names) == len(set(names)) for names in actual.values()), "an owner is registered twice"
