"""Drafts that always propose, whatever it costs, so that tests see tokens accepted and refused."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpu_worker.engine.sequence import PlannedSequence, StepPlan
from gpu_worker.engine.sequence import Sequence as ScheduledSequence
from gpu_worker.speculation.port import DraftableStep, DraftCounts, Drafts, RequestBehind
from gpu_worker.speculation.proposer import Proposer, Rates


class EagerDrafts:
    """Implements `Drafts`: a random number of tokens of the proposer for a random part of the sequences."""

    def __init__(self, proposer: Proposer, *, seed: int, most: int = 6) -> None:
        self.proposer = proposer
        self._random = random.Random(seed)
        self._most = most
        self._counts = [0, 0, 0]

    @property
    def counts(self) -> DraftCounts:
        num_steps, num_proposed, num_accepted = self._counts
        return DraftCounts(num_steps=num_steps, num_proposed=num_proposed, num_accepted=num_accepted)

    def bind(self, request_behind: RequestBehind) -> None:
        self.proposer.bind(request_behind)

    def propose(self, step: DraftableStep) -> Mapping[str, Sequence[int]]:
        offers = self.proposer.offer(step.decoding, self._most)
        counts = {
            sequence.sequence_id: self._random.randint(1, len(rates))
            for (sequence, _), rates in zip(step.decoding, offers, strict=True)
            if rates and self._random.random() < 0.8
        }
        return self.proposer.propose(counts) if counts else {}

    def record(self, sequence: ScheduledSequence, planned: PlannedSequence, num_accepted: int) -> None:
        for index, count in enumerate((1, planned.num_drafts, num_accepted)):
            self._counts[index] += count
        self.proposer.record(sequence, planned.num_drafts, num_accepted)

    def observe(self, plan: StepPlan, seconds: float) -> None: ...

    def forget(self, sequence_id: str) -> None:
        self.proposer.forget(sequence_id)


class Oracle:
    """Implements `Proposer`: what comes next is known, and sometimes wrong on purpose."""

    has_failed = False

    def __init__(self, next_tokens: Callable[[ScheduledSequence], Sequence[int]], *, seed: int) -> None:
        """`next_tokens`: what follows the newest token of a sequence, as far as it is known."""
        self._next_tokens = next_tokens
        self._random = random.Random(seed)
        self._known: dict[str, Sequence[int]] = {}

    def bind(self, request_behind: RequestBehind) -> None: ...

    def offer(self, decoding: Sequence[tuple[ScheduledSequence, int]], most: int) -> list[Rates]:
        self._known = {sequence.sequence_id: self._next_tokens(sequence)[:most] for sequence, _ in decoding}
        return [
            (0.5,) * min(room, len(self._known[sequence.sequence_id])) if room > 0 else ()
            for sequence, room in decoding
        ]

    def seconds(self, depth: int) -> float:
        return 0.0 * depth

    def propose(self, counts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        return {
            sequence_id: tuple(
                token_id if self._random.random() < 0.8 else (token_id + 1) % 256
                for token_id in self._known[sequence_id][:count]
            )
            for sequence_id, count in counts.items()
        }

    def record(self, sequence: ScheduledSequence, num_proposed: int, num_accepted: int) -> None: ...

    def forget(self, sequence_id: str) -> None: ...


@dataclass(kw_only=True)
class AlwaysSpeculating:
    """Implements `Speculation`; `made` are all drafts that engines got."""

    make_proposer: Callable[[], Proposer]
    seed: int = 0

    def __post_init__(self) -> None:
        self.made: list[EagerDrafts] = []

    def drafts(self) -> Drafts:
        self.made.append(EagerDrafts(self.make_proposer(), seed=self.seed + len(self.made)))
        return self.made[-1]
