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


def extend_block_hash(root: PrefixRoot, parent: BlockHash | None, token_ids: Sequence[int]) -> BlockHash:
    """Hash of one full block behind `parent` (None for the first block). blake2b is keyed by the root (RFC 7693)."""
    digest = blake2b(parent or b"", digest_size=_HASH_SIZE, key=root)
    digest.update(struct.pack(f"<{len(token_ids)}I", *token_ids))
    return BlockHash(digest.digest())


def block_hashes(
    root: PrefixRoot, token_ids: Sequence[int], block_size: int, *, known: Sequence[BlockHash] = ()
) -> list[BlockHash]:
    """Hashes of all full blocks of `token_ids`, in order; a last block that is not full has none.

    `known` are the hashes of the first blocks, computed before; they are returned as they are.
    """
    if block_size < 1:
        raise ValueError("block_size must be at least 1")
    hashes = list(known)
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else None
        hashes.append(extend_block_hash(root, parent, token_ids[start : start + block_size]))
    return hashes
