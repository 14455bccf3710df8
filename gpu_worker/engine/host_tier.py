"""The second place of cached blocks, in host memory: which slot holds which content. Pure.

A plan copies to the host first and from the host then. So that neither order nor repetition of copies matters, a slot
that the plan being made reads, writes or counts on is not given to other content before the plan is finished.
"""

from collections import OrderedDict
from dataclasses import dataclass

from service_kit.prefix_hash import BlockHash


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlace:
    """A slot for new content, and the name of what it held before."""

    slot: int
    lost: BlockHash | None = None


class HostTier:
    """`num_slots` host blocks keyed by prefix hash, least recently used first to go; 0 slots keep nothing."""

    def __init__(self, *, num_slots: int) -> None:
        if num_slots < 0:
            raise ValueError("num_host_blocks must be at least 0")
        self._num_slots = num_slots
        # Slots in use by the plan stand last, because each use moves to the end.
        self._slot_by_hash: OrderedDict[BlockHash, int] = OrderedDict()
        self._free = list(range(num_slots - 1, -1, -1))
        self._in_plan: set[int] = set()

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._slot_by_hash

    def use(self, block_hash: BlockHash) -> int:
        """The slot of content that is there; it stays there until the plan is finished."""
        slot = self._slot_by_hash[block_hash]
        self._slot_by_hash.move_to_end(block_hash)
        self._in_plan.add(slot)
        return slot

    def store(self, block_hash: BlockHash) -> HostPlace | None:
        """A slot for content that is not there yet; None when the plan uses all of them."""
        assert block_hash not in self._slot_by_hash, "stored twice"
        lost: BlockHash | None = None
        if self._free:
            slot = self._free.pop()
        else:
            oldest = next(iter(self._slot_by_hash), None)
            if oldest is None or self._slot_by_hash[oldest] in self._in_plan:
                return None
            slot, lost = self._slot_by_hash.pop(oldest), oldest
        self._slot_by_hash[block_hash] = slot
        self._in_plan.add(slot)
        return HostPlace(slot=slot, lost=lost)

    def discard(self, block_hash: BlockHash) -> bool:
        """Forgets one content; False when it was not there. Between plans only."""
        slot = self._slot_by_hash.pop(block_hash, None)
        if slot is None:
            return False
        assert slot not in self._in_plan, "a plan uses the slot"
        self._free.append(slot)
        return True

    def finish_plan(self) -> None:
        """The plan is made; its copies are done before the next one is."""
        self._in_plan.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self._slot_by_hash.clear()
        self._in_plan.clear()
        self._free = list(range(self._num_slots - 1, -1, -1))

    def hashes(self) -> set[BlockHash]:
        return set(self._slot_by_hash)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot is either free or holds one content."""
        slots = [*self._free, *self._slot_by_hash.values()]
        assert sorted(slots) == list(range(self._num_slots)), "host slots are lost or doubled"
        assert not self._in_plan & set(self._free), "the plan uses a free host slot"
