"""Finds the first stop string in a text that comes piece by piece. Pure.

An automaton over all stop strings (Aho and Corasick 1975): one state for every prefix of a stop string, amortized constant
time per character however many there are. A state means: this prefix is the longest one that the text ends with.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

_ROOT = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopHit:
    """The stop string that was complete first, the longest of several; `end` is how many characters of the piece it took."""

    pattern: str
    end: int


class StopMatcher:
    """The automaton and its state. Mutable: one per output."""

    __slots__ = ("_completed", "_depth", "_edges", "_fallback", "_first", "_state")

    def __init__(self, patterns: Iterable[str]) -> None:
        self._edges: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._completed: list[str | None] = [None]
        for pattern in patterns:
            self._insert(pattern)
        self._fallback = [_ROOT] * len(self._edges)
        self._link()
        self._first = frozenset(self._edges[_ROOT])
        self._state = _ROOT

    @property
    def num_undecided(self) -> int:
        """How many characters at the end of the text may be the beginning of a stop string."""
        return self._depth[self._state]

    def feed(self, piece: str) -> StopHit | None:
        """Moves over `piece`, or up to its first hit, behind which nothing is looked for."""
        state = self._state
        if state == _ROOT and self._first.isdisjoint(piece):
            return None
        edges = self._edges
        for index, character in enumerate(piece):
            while state and character not in edges[state]:
                state = self._fallback[state]
            state = edges[state].get(character, _ROOT)
            pattern = self._completed[state]
            if pattern is not None:
                self._state = state
                return StopHit(pattern=pattern, end=index + 1)
        self._state = state
        return None

    def _insert(self, pattern: str) -> None:
        state = _ROOT
        for character in pattern:
            following = self._edges[state].get(character)
            if following is None:
                following = len(self._edges)
                self._edges[state][character] = following
                self._edges.append({})
                self._depth.append(self._depth[state] + 1)
                self._completed.append(None)
            state = following
        self._completed[state] = pattern

    def _link(self) -> None:
        """Sets every state's fallback, the longest other prefix its text ends with, and what is complete there."""
        waiting = deque(self._edges[_ROOT].values())
        while waiting:
            state = waiting.popleft()
            for character, following in self._edges[state].items():
                fallback = self._fallback[state]
                while fallback and character not in self._edges[fallback]:
                    fallback = self._fallback[fallback]
                self._fallback[following] = self._edges[fallback].get(character, _ROOT)
                if self._completed[following] is None:
                    # Its fallback is shorter and therefore linked already.
                    self._completed[following] = self._completed[self._fallback[following]]
                waiting.append(following)
