"""The pool of KV blocks: which are free and how many hold each of the others. Pure.

A block is `block_size` token slots of KV memory in every layer, named by its index. The pool owns the counts; whoever
allocated or shared a block must release it exactly once.
"""

from collections import OrderedDict
from collections.abc import Iterable


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free; nothing was allocated."""


class BlockAccountingError(Exception):
    """A block was released or shared that nobody holds, or the counts contradict each other: a bug of the caller."""


class BlockPool:
    """`num_blocks` blocks with reference counts; every operation is O(1) per block.

    The free list is kept in the order in which blocks are taken: those released last come first, so that a lightly
    loaded engine keeps using the same memory.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError("num_blocks and block_size must be at least 1")
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._num_references = [0] * num_blocks
        # Ordered and keyed by block, so that a block can leave from the middle when its content is wanted again.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self._block_size)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free blocks, each held once. Raises OutOfBlocksError and then takes none."""
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks asked for, {len(self._free)} are free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._num_references[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """One more holder of a block that is in use. Raises BlockAccountingError when it is free."""
        if self._num_references[block] == 0:
            raise BlockAccountingError(f"block {block} is free and cannot be shared")
        self._num_references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less of each block; the last one frees it. Raises BlockAccountingError for a free block."""
        for block in blocks:
            if self._num_references[block] == 0:
                raise BlockAccountingError(f"block {block} was released more often than it was held")
            self._num_references[block] -= 1
            if self._num_references[block] == 0:
                self._free[block] = None
                self._free.move_to_end(block, last=False)

    def num_references(self, block: int) -> int:
        """Holders of a block; 0 when it is free."""
        return self._num_references[block]

    def check_integrity(self) -> None:
        """Raises BlockAccountingError unless exactly the blocks without a holder are free."""
        for block, count in enumerate(self._num_references):
            if count < 0 or (count == 0) != (block in self._free):
                raise BlockAccountingError(f"block {block} has {count} holders and free is {block in self._free}")
        if not self._free.keys() <= set(range(self._num_blocks)):
            raise BlockAccountingError("the free list names blocks that do not exist")
