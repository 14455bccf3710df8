"""The sequences that wait for blocks, in the order in which they are served. Pure."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from gpu_worker.engine.sequence import NUM_CLASSES, Sequence

_by_order = attrgetter("order")


class WaitingSequences:
    """Sorted by class, then arrival. Tokens of members do not grow while they wait."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._num_tokens = [0] * NUM_CLASSES

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Over those that wait now; they may be removed meanwhile."""
        return iter(self._sequences.copy())

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_by_order)
        self._num_tokens[sequence.priority] += sequence.num_tokens

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._sequences, sequence.order, key=_by_order)
        assert self._sequences[index] is sequence
        del self._sequences[index]
        self._num_tokens[sequence.priority] -= sequence.num_tokens

    def num_tokens_up_to(self, priority: int) -> int:
        """Tokens of those of that class and of higher ones, which go first."""
        return sum(self._num_tokens[: priority + 1])

    def check_integrity(self) -> None:
        """Raises AssertionError unless order and counts are right."""
        assert self._sequences == sorted(self._sequences, key=_by_order), "waiting sequences are out of order"
        for priority in range(NUM_CLASSES):
            counted = sum(each.num_tokens for each in self._sequences if each.priority == priority)
            assert counted == self._num_tokens[priority], "waiting tokens are miscounted"
