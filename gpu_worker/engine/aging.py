"""What higher classes would keep waiting for ever is raised above them, one sequence at a time. Pure.

Seconds are those that steps took to compute: while nothing is computed, nobody is kept waiting by others.
"""

from gpu_worker.engine.waiting import WaitingSequences

HIGHEST = 0
PATIENCE_S = 30.0
"""How long a sequence may have waited in all, since it came and whenever it had lost its blocks."""
_TICK_S = 1.0
"""Waits are counted so often, so that a step costs nothing for it."""


class Aging:
    """Owner of the waits of lower classes. A sequence that has waited for too long becomes one of the highest class until
    it ends: by its arrival it goes before what came later, and does not lose its blocks to that.

    One at a time: the higher classes share the batch with no more than one such sequence, however many have waited.
    """

    def __init__(self) -> None:
        self._uncounted_s = 0.0
        self._waited_s: dict[str, float] = {}
        self._raised: str | None = None

    def pass_time(self, seconds: float, waiting: WaitingSequences) -> None:
        """A step took so long. May raise one of those that wait."""
        self._uncounted_s += seconds
        if self._uncounted_s < _TICK_S:
            return
        passed_s, self._uncounted_s = self._uncounted_s, 0.0
        lower = [sequence for sequence in waiting if sequence.priority > HIGHEST]
        for sequence in lower:
            self._waited_s[sequence.sequence_id] = self._waited_s.get(sequence.sequence_id, 0.0) + passed_s
        aged = [sequence for sequence in lower if self._waited_s[sequence.sequence_id] >= PATIENCE_S]
        if aged and self._raised is None:
            oldest = min(aged, key=lambda sequence: sequence.arrival)
            self._raised = oldest.sequence_id
            waiting.remove(oldest)
            oldest.priority = HIGHEST
            waiting.add(oldest)

    def forget(self, sequence_id: str) -> None:
        """It has ended."""
        self._waited_s.pop(sequence_id, None)
        if self._raised == sequence_id:
            self._raised = None
