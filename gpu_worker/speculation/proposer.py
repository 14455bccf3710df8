"""What makes proposals: by looking up, or by a smaller model. Pure."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from gpu_worker.engine.sequence import Sequence as ScheduledSequence
from gpu_worker.speculation.port import RequestBehind

Rates = tuple[float, ...]
"""How probably each proposed token of a sequence is right, given that those before it are."""


class Proposer(Protocol):
    """Called in each step in the order of its methods; a step may end after each. `has_failed`: it proposes nothing any
    more."""

    has_failed: bool

    def bind(self, request_behind: RequestBehind) -> None:
        """Once, before everything else."""

    def offer(self, decoding: Sequence[tuple[ScheduledSequence, int]], most: int) -> list[Rates]:
        """What it could propose for each sequence: at most `most` tokens and no more than the number beside it."""

    def seconds(self, depth: int) -> float:
        """How long `propose` will take when the most that a sequence gets are `depth` tokens."""

    def propose(self, counts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """So many of the tokens that were offered, or fewer, by sequence id. Never raises."""

    def record(self, sequence: ScheduledSequence, num_proposed: int, num_accepted: int) -> None:
        """What became of proposed tokens; the sequence has the drawn ones already."""

    def forget(self, sequence_id: str) -> None:
        """The sequence has ended. Unknown ids are ignored."""
