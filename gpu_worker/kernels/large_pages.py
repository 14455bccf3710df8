"""Memory in pages of 2 MiB, for what every step reads from end to end: weights, keys and values.

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
            self._chunk, begin = zeros(max(num_bytes, _CHUNK_BYTES)), 0
        self._used = begin + num_bytes
        return self._chunk[begin : self._used]


def zeros(num_bytes: int) -> torch.Tensor:
    """[num_bytes], uint8: memory of its own from the beginning of a page on, taken page by page as it is written."""
    memory = mmap.mmap(-1, num_bytes + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel that knows no large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % PAGE_BYTES
    return whole[begin : begin + num_bytes]


WEIGHTS = LargePages()
"""Where packed weights lie."""
