"""The pool of KV blocks: how many hold each of them, and in which order free ones are taken. Pure.

A block is `block_size` token slots of KV memory in every layer, named by its index. The pool owns the counts; whoever
allocated or shared a block must release it exactly once.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free; nothing was allocated."""


class BlockAccountingError(Exception):
    """A block was released or shared that nobody holds, or the counts contradict each other: a bug of the caller."""


class BlockPool:
    """`num_blocks` blocks with reference counts; every operation is O(1) per block.

    A free block may keep its content, so that it can be shared again until it is taken. Blocks without content are taken
    first, those released last before the others, so that a lightly loaded engine keeps using the same memory; then those
    with content, the least recently released first.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError("num_blocks and block_size must be at least 1")
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._num_references = [0] * num_blocks
        self._is_kept = [False] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        # Ordered and keyed by block, so that a block can leave from the middle when its content is wanted again.
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, with content or without."""
        return len(self._blank) + len(self._kept)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self._block_size)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free blocks, each held once; their content is lost.

        Raises OutOfBlocksError and then takes none.
        """
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks asked for, {self.num_free} are free")
        num_blank = min(count, len(self._blank))
        blocks = [self._blank.pop() for _ in range(num_blank)]
        blocks += [self._kept.popitem(last=False)[0] for _ in range(count - num_blank)]
        for block in blocks:
            self._num_references[block] = 1
            self._is_kept[block] = False
        return blocks

    def share(self, block: int) -> None:
        """One more holder of a block that is in use or has kept its content. Raises BlockAccountingError for others."""
        if self._num_references[block] == 0:
            if block not in self._kept:
                raise BlockAccountingError(f"block {block} is free and cannot be shared")
            del self._kept[block]
        self._num_references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less of each block; the last one frees it. Raises BlockAccountingError for a free block.

        In the order given: blocks released first are taken first among those with content.
        """
        for block in blocks:
            if self._num_references[block] == 0:
                raise BlockAccountingError(f"block {block} was released more often than it was held")
            self._num_references[block] -= 1
            if self._num_references[block] == 0:
                if self._is_kept[block]:
                    self._kept[block] = None
                else:
                    self._blank.append(block)

    def keep(self, block: int) -> None:
        """The block keeps its content when it becomes free. Raises BlockAccountingError when it is free already."""
        if self._num_references[block] == 0:
            raise BlockAccountingError(f"block {block} is free and has no content to keep")
        self._is_kept[block] = True

    def forget(self, block: int) -> None:
        """Drops the content of a block, which its holders, if any, keep until they release it."""
        self._is_kept[block] = False
        if block in self._kept:
            del self._kept[block]
            self._blank.append(block)

    def forget_unheld(self) -> list[int]:
        """Drops the content of all free blocks; returns those that had some."""
        blocks = list(self._kept)
        for block in blocks:
            self._is_kept[block] = False
        self._kept.clear()
        self._blank += blocks
        return blocks

    def num_references(self, block: int) -> int:
        """Holders of a block; 0 when it is free."""
        return self._num_references[block]

    def num_held_only_by(self, block_tables: Iterable[Sequence[int]]) -> int:
        """Blocks that would be free if all these holders gave them up."""
        references, num_held, num_blocks = self._num_references, dict[int, int](), 0
        for block_table in block_tables:
            for block in block_table:
                if references[block] == 1:
                    num_blocks += 1
                else:
                    num_held[block] = num_held.get(block, 0) + 1
        return num_blocks + sum(count == references[block] for block, count in num_held.items())

    def is_kept(self, block: int) -> bool:
        """Whether the block has content that outlives its holders."""
        return self._is_kept[block]

    def check_integrity(self) -> None:
        """Raises BlockAccountingError unless exactly the blocks without a holder are free, each in the right list."""
        blank = set(self._blank)
        if len(blank) != len(self._blank) or not blank.isdisjoint(self._kept):
            raise BlockAccountingError("a block is free twice")
        if not blank | self._kept.keys() <= set(range(self._num_blocks)):
            raise BlockAccountingError("the free list names blocks that do not exist")
        for block, count in enumerate(self._num_references):
            is_free = block in blank or block in self._kept
            if count < 0 or (count == 0) != is_free:
                raise BlockAccountingError(f"block {block} has {count} holders and free is {is_free}")
            if is_free and (block in self._kept) != self._is_kept[block]:
                raise BlockAccountingError(f"block {block} is in the wrong list of free blocks")
