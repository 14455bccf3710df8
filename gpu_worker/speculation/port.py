"""What the step scheduler asks of whoever proposes tokens. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpu_worker.engine.sequence import PlannedSequence, StepPlan
from gpu_worker.engine.sequence import Sequence as ScheduledSequence

Proposals = Mapping[str, Sequence[int]]
"""By sequence id: tokens that may follow its newest one. None, or fewer than there is room for, are as good as any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftableStep:
    """A step that is planned but for proposed tokens.

    decoding: sequences of which only the newest token is computed, in order, each with the number of proposed tokens that it
    can take. num_rows: rows of the step so far, those of prefills included. room: rows that may still be added.
    """

    decoding: tuple[tuple[ScheduledSequence, int], ...]
    num_rows: int
    room: int


class Drafts(Protocol):
    """Proposes tokens, and hears what became of them. Whatever it proposes changes no output, only how soon it comes."""

    def propose(self, step: DraftableStep) -> Proposals:
        """Once for every step in which a sequence decodes. Never raises."""

    def record(self, sequence: ScheduledSequence, planned: PlannedSequence, num_accepted: int) -> None:
        """So many of the planned drafts were right; the sequence has the tokens drawn in the step already."""

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """How long a plan took to compute, without proposing."""

    def forget(self, sequence_id: str) -> None:
        """The sequence has ended. Unknown ids are ignored."""
