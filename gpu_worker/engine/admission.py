"""Whether a waiting sequence may come in, and at whose expense. Pure."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from math import ceil

from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine.step_cost import StepCost
from gpu_worker.engine.step_limits import StepLimits

_DECAY_STEPS = 300
_RISE = 0.1
# Output beyond this is not reserved for: so long an output is rare, and a few such limits would empty the batch.
_MAX_EXPECTED_TOKENS = 4096


class GrowthRatio:
    """The share of its remaining output that a running sequence is expected to use (after SGLang's new_token_ratio).

    Few sequences use all the output they may. Reserving it all would leave most memory empty, reserving nothing would
    make sequences throw each other out. So the share rises when memory ran out and sinks slowly otherwise.
    """

    def __init__(self, *, initial: float, minimum: float) -> None:
        self._value = initial
        self._minimum = minimum
        self._decay = (initial - minimum) / _DECAY_STEPS

    @property
    def value(self) -> float:
        return self._value

    def step(self, *, is_short_of_blocks: bool) -> None:
        """One more step was planned. Short: a sequence lost its blocks because others grew."""
        if is_short_of_blocks:
            self._value = min(1.0, self._value + _RISE)
        else:
            self._value = max(self._minimum, self._value - self._decay)

    def expected_tokens(self, sequence: Sequence) -> int:
        """Tokens in KV memory that the sequence is expected to reach; the last one that it may have is only sampled."""
        remaining = min(sequence.max_total_tokens - 1 - sequence.num_tokens, _MAX_EXPECTED_TOKENS)
        return sequence.num_tokens + ceil(self._value * max(0, remaining))


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """How a waiting sequence comes in: over whom, with how many found blocks, and whether the last is copied for it.

    A sequence that was found to its last token computes that one again, into a block that nobody else reads.
    """

    num_found: int
    is_last_private: bool
    victims: tuple[Sequence, ...] = ()


class _Leaving:
    """Blocks of sequences that might be thrown out."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._num_leaving_by_block: dict[int, int] = {}
        self.num_free = pool.num_free
        """Blocks that are free when they left."""

    def add(self, sequence: Sequence) -> None:
        for block in sequence.block_table:
            num_leaving = self._num_leaving_by_block.get(block, 0) + 1
            self._num_leaving_by_block[block] = num_leaving
            self.num_free += self._pool.num_references(block) == num_leaving

    def is_free(self, block: int) -> bool:
        return self._pool.num_references(block) == self._num_leaving_by_block.get(block, 0)


class AdmissionRule:
    """A sequence comes in when the known tokens of all running ones and its own fit, and the expected growth besides.

    Growth is not kept free for lower classes, which it may throw out; and nothing is kept free when it would run alone,
    so that whatever could ever run does.
    """

    def __init__(self, *, pool: BlockPool, limits: StepLimits, growth: GrowthRatio, cost: StepCost) -> None:
        self._pool = pool
        self._limits = limits
        self._growth = growth
        self._cost = cost
        # Kept free besides the expected growth, which is the least certain when a batch is small.
        self._watermark = max(1, pool.num_blocks // 100)

    def decide(
        self, sequence: Sequence, found: SequenceOf[int | None], running: SequenceOf[Sequence]
    ) -> Admission | None:
        """None when it has to wait. `running` in order; the last of strictly lower classes are thrown out if need be."""
        if len(running) >= self._limits.max_running and running[-1].priority <= sequence.priority:
            return None
        num_stays = len(running)
        num_owed = sum(self._num_owed(other, sequence.priority) for other in running)
        num_attended = sum(other.num_tokens for other in running) + sequence.num_tokens
        leaving = _Leaving(self._pool)
        while True:
            # Whoever replaces a running sequence does not make the batch slower than it was.
            if num_stays < len(running) or self._has_place(num_stays, num_attended):
                num_tokens = self._growth.expected_tokens(sequence) if num_stays else sequence.num_tokens
                needed = self._pool.num_blocks_for(num_tokens) + num_owed + (self._watermark if num_stays else 0)
                for admission in self._ways(sequence, found, victims=running[num_stays:]):
                    if needed + _num_taken(found, admission, leaving) <= leaving.num_free:
                        return admission
            if num_stays == 0 or running[num_stays - 1].priority <= sequence.priority:
                return None
            num_stays -= 1
            num_owed -= self._num_owed(running[num_stays], sequence.priority)
            num_attended -= running[num_stays].num_tokens
            leaving.add(running[num_stays])

    def room_blocks(self, running: SequenceOf[Sequence], priority: int) -> int:
        """Blocks that a new sequence of that class could get: free ones, and those that only lower classes hold."""
        if not running or running[-1].priority <= priority:
            return self._pool.num_free
        if running[0].priority > priority:
            return self._pool.num_blocks
        lower = (other.block_table for other in running if other.priority > priority)
        return self._pool.num_free + self._pool.num_held_only_by(lower)

    def _has_place(self, num_others: int, num_attended: int) -> bool:
        """Whether the batch, enlarged by one, is small enough and decodes fast enough."""
        if num_others >= self._limits.max_running:
            return False
        if self._limits.target_step_s is None or num_others == 0:
            return True
        seconds = self._cost.predict(tokens=num_others + 1, attended=num_attended)
        return seconds is None or seconds <= self._limits.target_step_s

    def _ways(
        self, sequence: Sequence, found: SequenceOf[int | None], victims: SequenceOf[Sequence]
    ) -> list[Admission]:
        """How the found blocks can be used, the best first.

        A copy of the last block takes a block more than computing it does, which may be the one that is missing.
        """
        victims = tuple(victims)
        if len(found) * self._pool.block_size < sequence.num_tokens:
            return [Admission(num_found=len(found), is_last_private=False, victims=victims)]
        return [
            Admission(num_found=len(found), is_last_private=True, victims=victims),
            Admission(num_found=len(found) - 1, is_last_private=False, victims=victims),
        ]

    def _num_owed(self, other: Sequence, priority: int) -> int:
        """Blocks that a running sequence is still to get, as seen by a newcomer of that class."""
        num_tokens = self._growth.expected_tokens(other) if other.priority <= priority else other.num_tokens
        return self._pool.num_blocks_for(num_tokens) - len(other.block_table)


def _num_taken(found: SequenceOf[int | None], admission: Admission, leaving: _Leaving) -> int:
    """What found blocks change about the need for free ones: less for those in use, one more for a source of a copy.

    A found block that is free counts like any other block that is taken; a copied one is held beside its copy.
    """
    used = found[: admission.num_found]
    num_in_use = sum(block is not None and not leaving.is_free(block) for block in used)
    if not admission.is_last_private or used[-1] is None:
        return -num_in_use
    return 1 - num_in_use
