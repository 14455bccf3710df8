"""Chained keyed hash of full blocks of token ids: names a block by everything before and in it. Pure.

The scheduler (routing by cached prefix) and the engine (prefix cache) use the same function, so that they agree.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""16 bytes. Equal hashes mean equal model, tenant and token ids from the start of the sequence."""
PrefixRoot = NewType("PrefixRoot", bytes)
"""32 bytes: the key of all hashes of one model and tenant."""

MAX_ANNOUNCED_DIGESTS = 1 << 18
"""Most digests that a worker tells a scheduler of, and that one keeps: 2 MiB in a message. With blocks of 16 that is a
cache of 4 million tokens; what a larger one holds beyond it is found by the engine only."""
_ROOT_SIZE = 32
_HASH_SIZE = 16
_TOKEN_SIZE = 4


def digest_of(block_hash: BlockHash) -> int:
    """The first 64 bits of a hash: what load reports carry. A collision costs a detour, never a wrong output."""
    return int.from_bytes(block_hash[:8], "little")


def model_fingerprint(*, revision: str, precision: str) -> str:
    """What stands for a model in its prefix roots, at the scheduler as in the engine."""
    return f"{revision}:{precision}"


def prefix_root(*, model_fingerprint: str, tenant_salt: str) -> PrefixRoot:
    """The key for one model (revision and precision) and tenant. An empty salt shares prefixes between tenants."""
    digest = blake2b(digest_size=_ROOT_SIZE, person=b"sluice-prefix")
    for part in (model_fingerprint.encode(), tenant_salt.encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return PrefixRoot(digest.digest())


def extend_block_hashes(
    root: PrefixRoot, hashes: list[BlockHash], token_ids: Sequence[int], block_size: int, *, num_blocks: int
) -> None:
    """Appends to `hashes`, those of the first blocks of `token_ids`, the ones that are missing from `num_blocks`.

    Each is the hash of the one before it and the block's tokens; blake2b is keyed by the root (RFC 7693).
    """
    known = len(hashes)
    if num_blocks <= known:
        return
    fresh = token_ids[known * block_size : num_blocks * block_size]
    packed = struct.pack(f"<{(num_blocks - known) * block_size}I", *fresh)
    parent: bytes = hashes[-1] if hashes else b""
    size = block_size * _TOKEN_SIZE
    for start in range(0, len(packed), size):
        parent = blake2b(parent + packed[start : start + size], digest_size=_HASH_SIZE, key=root).digest()
        hashes.append(BlockHash(parent))


def block_hashes(
    root: PrefixRoot, token_ids: Sequence[int], block_size: int, *, known: Sequence[BlockHash] = ()
) -> list[BlockHash]:
    """Hashes of all full blocks of `token_ids`, in order; a last block that is not full has none.

    `known` are the hashes of the first blocks, computed before; they are returned as they are.
    """
    if block_size < 1:
        raise ValueError("block_size must be at least 1")
    hashes = list(known)
    extend_block_hashes(root, hashes, token_ids, block_size, num_blocks=len(token_ids) // block_size)
    return hashes
