"""How often proposed tokens turn out right, learned from those that did and did not. Pure."""

from dataclasses import dataclass, field

_KEPT_OF_ALL = 0.998
_KEPT_OF_ONE = 0.95
_PRIOR_WEIGHT = 4.0


@dataclass(slots=True)
class _Count:
    """Trials and hits of which older ones count exponentially less."""

    num_tried: float = 0.0
    num_right: float = 0.0

    def add(self, *, is_right: bool, kept: float) -> None:
        self.num_tried = self.num_tried * kept + 1
        self.num_right = self.num_right * kept + is_right

    def rate(self, prior: float) -> float:
        return (self.num_right + _PRIOR_WEIGHT * prior) / (self.num_tried + _PRIOR_WEIGHT)


@dataclass(slots=True)
class _Grades:
    counts: dict[int, _Count] = field(default_factory=dict)

    def of(self, grade: int) -> _Count:
        count = self.counts.get(grade)
        if count is None:
            count = self.counts[grade] = _Count()
        return count


class AcceptanceBook:
    """Rates by *grade*, which is what a proposer knows beforehand of how good a proposed token is; 0 is the worst.

    What a sequence did itself counts most; what it has not done yet is taken from all sequences, and of grades that nobody
    has tried from `priors`, one for each grade.
    """

    def __init__(self, priors: tuple[float, ...]) -> None:
        self._priors = priors
        self._all = _Grades()
        self._grades_by_sequence: dict[str, _Grades] = {}

    def rate(self, sequence_id: str, grade: int) -> float:
        """The probability that the next proposed token of a sequence is right, given that those before it are."""
        general = self._all.of(grade).rate(self._priors[grade])
        own = self._grades_by_sequence.get(sequence_id)
        return general if own is None else own.of(grade).rate(general)

    def record(self, sequence_id: str, grade: int, *, is_right: bool) -> None:
        self._all.of(grade).add(is_right=is_right, kept=_KEPT_OF_ALL)
        own = self._grades_by_sequence.get(sequence_id)
        if own is None:
            own = self._grades_by_sequence[sequence_id] = _Grades()
        own.of(grade).add(is_right=is_right, kept=_KEPT_OF_ONE)

    def forget(self, sequence_id: str) -> None:
        self._grades_by_sequence.pop(sequence_id, None)
