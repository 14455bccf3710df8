"""What the step scheduler asks of whoever proposes tokens. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpu_worker.engine.execution import SampleRequest
from gpu_worker.engine.sequence import PlannedSequence, StepPlan
from gpu_worker.engine.sequence import Sequence as ScheduledSequence

Proposals = Mapping[str, Sequence[int]]
"""By sequence id: tokens that may follow its newest one. None, or fewer than there is room for, are as good as any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftableStep:
    """A step that is planned but for proposed tokens.

    decoding: sequences of which only the newest token is computed, in order, each with the number of proposed tokens that it
    can take. num_rows: rows of the step so far, those of prefills included. room: rows that may still be added.
    target_s: the step is to take no longer because of them; None for no bound.
    """

    decoding: tuple[tuple[ScheduledSequence, int], ...]
    num_rows: int
    room: int
    target_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """Since the start. num_steps: how often a sequence had proposed tokens verified. is_on: whether proposing paid when it
    was last considered. num_stops: how often that ended."""

    num_steps: int
    num_proposed: int
    num_accepted: int
    is_on: bool = False
    num_stops: int = 0


NO_DRAFTS = DraftCounts(num_steps=0, num_proposed=0, num_accepted=0)

RequestBehind = Callable[[str, tuple[int, ...]], SampleRequest]
"""How the target draws the token of a sequence that stands behind its newest one and these proposed ones."""


class Drafts(Protocol):
    """Proposes tokens, and hears what became of them. Whatever it proposes changes no output, only how soon it comes."""

    @property
    def counts(self) -> DraftCounts: ...

    def bind(self, request_behind: RequestBehind) -> None:
        """Once, before everything else, by the engine that draws."""

    def propose(self, step: DraftableStep) -> Proposals:
        """Once for every step in which a sequence decodes. Never raises."""

    def record(self, sequence: ScheduledSequence, planned: PlannedSequence, num_accepted: int) -> None:
        """So many of the planned drafts were right; the sequence has the tokens drawn in the step already."""

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """How long a plan took to compute, without proposing."""

    def forget(self, sequence_id: str) -> None:
        """The sequence has ended. Unknown ids are ignored."""


class Speculation(Protocol):
    """What a loaded model speculates with."""

    def drafts(self) -> Drafts:
        """New ones that have learned nothing yet, for one engine."""
