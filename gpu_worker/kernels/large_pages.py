"""Memory in pages of 2 MiB, for weights that every step reads from end to end.

The processor fetches ahead only within a page, and looks up a page's address when it enters it: with small pages a third of
the bandwidth of memory is lost. Where the system grants no large pages the memory is the usual one.
"""

import contextlib
import mmap

import torch

PAGE_BYTES = 2 << 20
_LINE_BYTES = 64
_CHUNK_BYTES = 8 * PAGE_BYTES


class LargePages:
    """Hands out pieces of one chunk after the other. A chunk is given back when the last tensor in it is gone. For one thread
    of Python at a time."""

    def __init__(self) -> None:
        self._chunk, self._used = torch.empty(0, dtype=torch.uint8), 0

    def empty(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes], uint8, from the beginning of a cache line on."""
        begin = -(-self._used // _LINE_BYTES) * _LINE_BYTES
        if begin + num_bytes > self._chunk.shape[0]:
            self._chunk, begin = _map(max(num_bytes, _CHUNK_BYTES)), 0
        self._used = begin + num_bytes
        return self._chunk[begin : self._used]


def _map(num_bytes: int) -> torch.Tensor:
    """Memory of its own, zeros, that begins with a page."""
    size = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    memory = mmap.mmap(-1, size + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel that knows no large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % PAGE_BYTES
    return whole[begin : begin + size]


WEIGHTS = LargePages()
"""Where packed weights lie."""
