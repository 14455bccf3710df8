"""Which sequences of the simulated engine run in a step, and what memory they hold. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_worker.engine.simulated_cache import SimulatedPrefixCache
from service_kit.prefix_hash import BlockHash


@dataclass(slots=True, kw_only=True)
class SimulatedSequence:
    """One sequence's place in the batch. `rank` is (class, arrival): the smallest goes first, the largest yields."""

    sequence_id: str
    rank: tuple[int, int]
    num_tokens: int
    """Prompt and output so far; the computed ones chase them."""
    hashes: Sequence[BlockHash] = ()
    """Of the full blocks that can be shared."""
    num_computed: int = 0
    num_blocks: int = 0
    is_running: bool = False
    num_to_fill: int = 0
    """Tokens at its last admission: computing them fills the cache, computing more is decoding."""
    num_held: int = 0
    """Blocks, of those that have a hash, that it holds in the prefix cache."""
    num_cached: int | None = None
    """Tokens that did not have to be computed at its first admission."""


class SimulatedBatch:
    """Owner of the blocks and of the running set.

    A sequence is admitted when blocks for all its tokens are free and every running one could still take its next block.
    A running one that finds no block preempts the running one of the largest rank, itself included; a waiting one that
    finds no block or no place in the batch preempts only strictly lower classes, and nobody overtakes it. The first in rank
    therefore always gets on.
    """

    def __init__(self, *, num_blocks: int, block_size: int, max_running: int) -> None:
        self.num_free_blocks = num_blocks
        self.largest_batch = 0
        self.num_preempted = 0
        self.num_computed_prompt_tokens = 0
        self.num_cached_prompt_tokens = 0
        self.cache = SimulatedPrefixCache()
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_running = max_running
        self._sequences: dict[str, SimulatedSequence] = {}

    @property
    def num_running(self) -> int:
        return sum(sequence.is_running for sequence in self._sequences.values())

    @property
    def num_waiting(self) -> int:
        return len(self._sequences) - self.num_running

    def waste(self) -> float:
        """Share of slots in allocated blocks that hold no token."""
        num_slots = (self._num_blocks - self.num_free_blocks) * self._block_size
        num_used = sum(sequence.num_computed for sequence in self._sequences.values())
        return 1 - num_used / num_slots if num_slots else 0.0

    def room_blocks(self) -> tuple[int, int, int]:
        """Blocks that a new sequence of each class could get: the free ones and those of strictly lower classes, without
        what waits in its own or a higher class, which goes first."""

        def room(priority: int) -> int:
            lower = sum(each.num_blocks for each in self._sequences.values() if each.rank[0] > priority)
            before = (each for each in self._sequences.values() if not each.is_running and each.rank[0] <= priority)
            return max(0, self.num_free_blocks + lower - sum(map(self._num_missing_blocks, before)))

        return room(0), room(1), room(2)

    def add(self, sequence: SimulatedSequence) -> None:
        self._sequences[sequence.sequence_id] = sequence

    def remove(self, sequence: SimulatedSequence) -> None:
        self._release(sequence)
        del self._sequences[sequence.sequence_id]

    def plan(self, budget: int) -> list[tuple[SimulatedSequence, int]]:
        """The sequences of this step, each with the number of tokens to compute, `budget` in all."""
        preempted: set[str] = set()
        is_queue_blocked = False
        for sequence in sorted(self._sequences.values(), key=lambda each: each.rank):
            if sequence.is_running:
                self._make_room(sequence, preempted)
            elif not is_queue_blocked and sequence.sequence_id not in preempted:
                self._make_room(sequence, preempted)
                is_queue_blocked = not sequence.is_running
        running = sorted((each for each in self._sequences.values() if each.is_running), key=lambda each: each.rank)
        self.largest_batch = max(self.largest_batch, len(running))
        self.cache.shrink(self.num_free_blocks)
        return self._share(running, budget)

    def advance(self, sequence: SimulatedSequence, chunk: int) -> bool:
        """Books computed tokens; True when the sequence makes its next token, which it then still has to compute."""
        if sequence.num_computed < sequence.num_to_fill:
            self.num_computed_prompt_tokens += min(chunk, sequence.num_to_fill - sequence.num_computed)
        sequence.num_computed += chunk
        if sequence.num_held < len(sequence.hashes):
            full = sequence.hashes[sequence.num_held : sequence.num_computed // self._block_size]
            self.cache.hold(full)
            sequence.num_held += len(full)
        if sequence.num_computed < sequence.num_tokens:
            return False
        sequence.num_tokens += 1
        return True

    def _share(self, running: Sequence[SimulatedSequence], budget: int) -> list[tuple[SimulatedSequence, int]]:
        """One token for each that decodes, the rest of the budget to prefill chunks in rank order."""
        num_decoding = sum(each.num_tokens - each.num_computed == 1 for each in running)
        rest = budget - num_decoding
        shares = []
        for each in running:
            missing = each.num_tokens - each.num_computed
            chunk = 1 if missing == 1 else min(missing, rest)
            rest -= chunk if missing > 1 else 0
            if chunk:
                shares.append((each, chunk))
        return shares

    def _make_room(self, sequence: SimulatedSequence, preempted: set[str]) -> None:
        """Admits a waiting sequence, or gets a running one the blocks of its next tokens, if it can."""
        needed = self._num_missing_blocks(sequence)
        while not self._has_room(sequence, needed):
            victim = self._victim(sequence)
            if victim is None:
                return
            self._release(victim)
            preempted.add(victim.sequence_id)
            self.num_preempted += 1
            if victim is sequence:
                return
        self.num_free_blocks -= needed
        sequence.num_blocks += needed
        if not sequence.is_running:
            self._admit(sequence)

    def _has_room(self, sequence: SimulatedSequence, needed: int) -> bool:
        if sequence.is_running:
            return self.num_free_blocks >= needed
        return self.num_running < self._max_running and self.num_free_blocks >= needed + self.num_running

    def _admit(self, sequence: SimulatedSequence) -> None:
        """What is cached need not be computed, but for the last token: its row gives the next one."""
        sequence.is_running = True
        sequence.num_to_fill = sequence.num_tokens
        sequence.num_held = self.cache.num_found(sequence.hashes)
        self.cache.hold(sequence.hashes[: sequence.num_held])
        sequence.num_computed = min(sequence.num_held * self._block_size, sequence.num_tokens - 1)
        self.num_cached_prompt_tokens += sequence.num_computed
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed

    def _num_missing_blocks(self, sequence: SimulatedSequence) -> int:
        """For all its tokens."""
        return -(-sequence.num_tokens // self._block_size) - sequence.num_blocks

    def _victim(self, sequence: SimulatedSequence) -> SimulatedSequence | None:
        last = max((each for each in self._sequences.values() if each.is_running), key=lambda e: e.rank, default=None)
        if last is None or sequence.is_running:
            return last
        return last if last.rank[0] > sequence.rank[0] else None

    def _release(self, sequence: SimulatedSequence) -> None:
        """Takes the blocks back; what was computed has to be computed again."""
        self.num_free_blocks += sequence.num_blocks
        self.cache.release(sequence.hashes[: sequence.num_held])
        sequence.num_held = 0
        sequence.num_blocks = 0
        sequence.num_computed = 0
        sequence.is_running = False
