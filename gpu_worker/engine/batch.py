"""The sequences of one engine: which run, which wait, and the blocks they hold. Pure.

Who runs next is decided elsewhere (`StepPlanner`); what they have computed is recorded by the `StepScheduler`.
"""

from bisect import bisect_left, insort
from operator import attrgetter

from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.engine.sequence import Sequence, SequenceState, StepPlan
from gpu_worker.engine.sequence_blocks import SequenceBlocks
from gpu_worker.engine.waiting import WaitingSequences

_by_order = attrgetter("order")


class NeverFitsError(Exception):
    """The sequence needs more blocks than there are, even alone."""


class Batch:
    """Owner of the states of all sequences. `running` is in order: class, then arrival."""

    def __init__(self, *, pool: BlockPool, num_host_blocks: int) -> None:
        self.pool = pool
        self.blocks = SequenceBlocks(pool=pool, num_host_blocks=num_host_blocks)
        self.running: list[Sequence] = []
        self.waiting = WaitingSequences()
        self.by_id: dict[str, Sequence] = {}
        self._num_arrived = 0
        self.num_preempted = 0
        """Preemptions since the start."""
        self.num_found_tokens = 0
        """Tokens found in the cache since the start, whenever a sequence got blocks."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV stands in blocks that somebody holds; shared ones count once."""
        block_size = self.pool.block_size
        # Only blocks of one holder have slots that are not computed.
        num_empty = sum(len(other.block_table) * block_size - other.num_computed_tokens for other in self.running)
        return (self.pool.num_blocks - self.pool.num_free) * block_size - num_empty

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence behind its class. Raises NeverFitsError when it could not run even alone."""
        assert sequence.sequence_id not in self.by_id, "sequence ids are unique"
        # The last token a sequence may have is only sampled; its KV is never needed.
        needed = self.pool.num_blocks_for(sequence.max_total_tokens - 1)
        if needed > self.pool.num_blocks:
            raise NeverFitsError(f"needs {needed} KV blocks, the engine has {self.pool.num_blocks}")
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        self.by_id[sequence.sequence_id] = sequence
        self.waiting.add(sequence)

    def start(self, sequence: Sequence, found: list[int | None], *, is_last_private: bool) -> None:
        """Makes a waiting sequence running, with the blocks found of it; arguments as in `SequenceBlocks.attach`."""
        self.blocks.attach(sequence, found, is_last_private=is_last_private)
        self.num_found_tokens += sequence.num_computed_tokens
        if sequence.state is SequenceState.WAITING:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        sequence.state = SequenceState.RUNNING
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_by_order)

    def preempt(self, victim: Sequence) -> None:
        """Takes the blocks of a running sequence; it waits again, at its old place."""
        self._stop(victim)
        victim.state = SequenceState.PREEMPTED
        self.waiting.add(victim)
        self.num_preempted += 1

    def remove(self, sequence_id: str) -> None:
        """Ends a sequence in any state and gives its blocks back at once."""
        sequence = self.by_id.pop(sequence_id)
        if sequence.state is SequenceState.RUNNING:
            self._stop(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.state = SequenceState.FINISHED

    def check_integrity(self, plan: StepPlan) -> None:
        """Raises BlockAccountingError or AssertionError unless blocks, names, tables and states agree, `plan` included."""
        self.blocks.check_integrity(self.by_id.values(), plan)
        assert self.running == sorted(self.running, key=_by_order), "running sequences are out of order"
        self.waiting.check_integrity()
        assert len(self.running) + len(self.waiting) == len(self.by_id)
        for sequence in self.by_id.values():
            is_running = sequence.state is SequenceState.RUNNING
            assert is_running == (sequence in self.running) != (sequence in self.waiting)

    def _stop(self, sequence: Sequence) -> None:
        index = bisect_left(self.running, sequence.order, key=_by_order)
        assert self.running[index] is sequence
        del self.running[index]
        self.blocks.detach(sequence)
