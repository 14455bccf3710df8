"""Work that is recorded once and replayed: for small batches, starting kernels one by one takes longer than they do."""

from collections.abc import Callable, Hashable
from typing import Protocol

import torch


class Graphs(Protocol):
    """Recorded work by key. What a body reads and writes stays where it is: only contents change between replays."""

    def record(self, key: Hashable, body: Callable[[], None]) -> None:
        """Records `body`, which is run on the way and may be run more than once. It may not wait for the device."""

    def replay(self, key: Hashable) -> None:
        """Runs what was recorded, in the order of the device's stream."""

    def __contains__(self, key: Hashable) -> bool: ...


class CudaGraphs:
    """Implements Graphs by CUDA graphs over one pool of memory, since no two are replayed at a time."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, key: Hashable, body: Callable[[], None]) -> None:
        # Outside of the recording first: kernels are compiled and libraries set up, which may wait.
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            body()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            body()
        self._graphs[key] = graph

    def replay(self, key: Hashable) -> None:
        self._graphs[key].replay()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs


class CalledGraphs:
    """Implements Graphs without a device: a replay calls the body again. `replayed` are the keys, in order."""

    def __init__(self) -> None:
        self._bodies: dict[Hashable, Callable[[], None]] = {}
        self.replayed: list[Hashable] = []

    def record(self, key: Hashable, body: Callable[[], None]) -> None:
        body()
        self._bodies[key] = body

    def replay(self, key: Hashable) -> None:
        self.replayed.append(key)
        self._bodies[key]()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._bodies


def padded_sizes(most: int) -> list[int]:
    """Numbers of rows that are recorded: powers of two up to 8, from there 8 or an eighth apart, and `most` itself."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += min(size, max(8, (1 << (size.bit_length() - 1)) // 8))
    return [*sizes, most]
