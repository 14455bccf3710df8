"""The names of KV blocks: which block holds the content that a prefix hash stands for. Pure."""

from service_kit.prefix_hash import BlockHash


class PrefixCache:
    """Hash to block and back; a hash names at most one block and a block has at most one name.

    A name is given after the content was computed or copied, and taken away before anything else is written.
    """

    def __init__(self, *, num_blocks: int) -> None:
        self._block_by_hash: dict[BlockHash, int] = {}
        self._hash_by_block: list[BlockHash | None] = [None] * num_blocks

    def __len__(self) -> int:
        return len(self._block_by_hash)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._block_by_hash

    def find(self, block_hash: BlockHash) -> int | None:
        """The block with this content."""
        return self._block_by_hash.get(block_hash)

    def name_of(self, block: int) -> BlockHash | None:
        """The hash under which the block can be found."""
        return self._hash_by_block[block]

    def give_name(self, block: int, block_hash: BlockHash) -> bool:
        """Makes the block findable; False when another block has the name, which it keeps."""
        if block_hash in self._block_by_hash:
            return False
        assert self._hash_by_block[block] is None, f"block {block} has a name"
        self._block_by_hash[block_hash] = block
        self._hash_by_block[block] = block_hash
        return True

    def take_name(self, block: int) -> BlockHash | None:
        """The block can no longer be found; returns its name, None if it had none."""
        block_hash = self._hash_by_block[block]
        if block_hash is not None:
            self._hash_by_block[block] = None
            del self._block_by_hash[block_hash]
        return block_hash

    def hashes(self) -> set[BlockHash]:
        return set(self._block_by_hash)

    def check_integrity(self) -> None:
        """Raises AssertionError unless names and blocks are each other's inverse."""
        named = {name: block for block, name in enumerate(self._hash_by_block) if name is not None}
        assert named == self._block_by_hash, "names and blocks disagree"
        assert len(named) == sum(name is not None for name in self._hash_by_block), "two blocks have one name"
