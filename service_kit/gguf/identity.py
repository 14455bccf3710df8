"""What gateway and worker must agree on about a GGUF file. Pure but for reading the file."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from service_kit.gguf.files import model_name, part_paths
from service_kit.gguf.header import GgufHeader, read_header
from service_kit.gguf.vocabulary import read_vocabulary

EMBEDDING = "token_embd.weight"
_CHUNK_BYTES = 16 << 20
_MAX_THREADS = 8
_MAX_CONTEXT_LENGTH = 1 << 22
"""Four times the longest that models have; tables of positions are as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufIdentity:
    """Name and identity of the model in a file, as in ModelManifest."""

    name: str
    revision: str
    context_length: int
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def read_identity(path: Path) -> GgufIdentity:
    """Reads the whole file, for its revision. Raises GgufError."""
    header = read_header(path)
    vocabulary = read_vocabulary(header)
    if EMBEDDING not in header.tensors:
        raise header.refuse(EMBEDDING, "missing; the file holds no model, or only a vocabulary")
    shape, num_tokens = header.tensors[EMBEDDING].shape, len(vocabulary.tokens)
    if len(shape) != 2 or shape[0] < num_tokens:  # noqa: PLR2004 - a matrix
        raise header.refuse(EMBEDDING, f"has shape {shape}, which is not a row for each of {num_tokens} tokens")
    return GgufIdentity(
        name=model_name(path),
        revision=content_hash(part_paths(path)),
        context_length=context_length(header),
        vocab_size=shape[0],
        bos_token_id=vocabulary.bos_id(header),
        eos_token_ids=vocabulary.end_ids(header),
    )


def context_length(header: GgufHeader) -> int:
    """Raises GgufError."""
    key = f"{header.architecture}.context_length"
    length = header.whole(key)
    if not 1 <= length <= _MAX_CONTEXT_LENGTH:
        raise header.refuse(key, f"{length} is not between 1 and {_MAX_CONTEXT_LENGTH}")
    return length


def content_hash(paths: tuple[Path, ...]) -> str:
    """Hash (16 hex digits) of the contents of files, of pieces in parallel: a file may have many gigabytes."""
    digest = hashlib.blake2b(digest_size=8)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as executor:
        for path in paths:
            with path.open("rb") as file:
                descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size
                digest.update(size.to_bytes(8, "little"))
                for piece in executor.map(lambda offset: _hash_piece(descriptor, offset), range(0, size, _CHUNK_BYTES)):  # noqa: B023 - used up before the next file
                    digest.update(piece)
    return digest.hexdigest()


def _hash_piece(descriptor: int, offset: int) -> bytes:
    return hashlib.blake2b(os.pread(descriptor, _CHUNK_BYTES, offset)).digest()
