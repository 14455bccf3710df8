"""Looks up what followed the newest tokens when they last stood in prompt or output (prompt look-up, Saxena 2023). Pure.

Places where the last two tokens stood are chained as in LZ77; of the newest few of them the longest match counts. Looking
up goes on while nothing is verified, so how often it is right is known before the first row is spent on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpu_worker.engine.sequence import Sequence as ScheduledSequence
from gpu_worker.speculation.acceptance import AcceptanceBook
from gpu_worker.speculation.port import RequestBehind
from gpu_worker.speculation.proposer import Rates

_MIN_LENGTH = 2
_MAX_LENGTH = 16
_MAX_PLACES = 8
_GRADE_BY_LENGTH = (0, 0, 0, 1, 2, 2, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 5)
_PRIORS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier place of the newest tokens: what followed stands from `place` on, and `length` tokens before it agree."""

    place: int
    length: int


class NgramIndex:
    """The places of all pairs of neighbouring tokens in a list that only grows."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._place_by_pair: dict[tuple[int, int], int] = {}
        # What stood at the same pair before: index is the place, 0 is none.
        self._earlier: list[int] = [0, 0]

    def find(self, hint: int | None = None) -> Match | None:
        """The longest match of the newest tokens, of equal ones the newest. `hint`: a place to look at first."""
        self._extend()
        token_ids = self._token_ids
        if len(token_ids) <= _MIN_LENGTH:
            return None
        best_place, best_length = 0, _MIN_LENGTH - 1
        if hint is not None:
            best_place, best_length = hint, self._length_at(hint)
        place = self._place_by_pair.get((token_ids[-2], token_ids[-1]), 0)
        for _ in range(_MAX_PLACES):
            if place == 0 or best_length == _MAX_LENGTH:
                break
            length = self._length_at(place)
            if length > best_length:
                best_place, best_length = place, length
            place = self._earlier[place]
        return Match(best_place, best_length) if best_length >= _MIN_LENGTH else None

    def follow(self, match: Match, count: int) -> tuple[int, ...]:
        """The `count` tokens behind a match; where it runs into the end, what it proposes goes on from there."""
        token_ids = self._token_ids
        following = list(token_ids[match.place : match.place + count])
        period = len(token_ids) - match.place
        while len(following) < count:
            following.append(following[len(following) - period])
        return tuple(following)

    def _length_at(self, place: int) -> int:
        token_ids, end = self._token_ids, len(self._token_ids)
        most = min(_MAX_LENGTH, place)
        length = 0
        while length < most and token_ids[place - 1 - length] == token_ids[end - 1 - length]:
            length += 1
        return length

    def _extend(self) -> None:
        """Adds the pairs that something follows."""
        token_ids, earlier, place_by_pair = self._token_ids, self._earlier, self._place_by_pair
        for place in range(len(earlier), len(token_ids)):
            pair = (token_ids[place - 2], token_ids[place - 1])
            earlier.append(place_by_pair.get(pair, 0))
            place_by_pair[pair] = place


class _Lookup:
    """The index of one sequence, and the match that says what comes next; it is checked against what came."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.index = NgramIndex(token_ids)
        self.match: Match | None = None
        self._token_ids = token_ids
        self._num_seen = len(token_ids)

    def advance(self, sequence_id: str, book: AcceptanceBook) -> None:
        """Tells the book how far the match was right, and finds the next one."""
        match, hint = self.match, None
        if match is not None:
            place, length = match.place, match.length
            for token_id in self._token_ids[self._num_seen :]:
                is_right = self._token_ids[place] == token_id
                book.record(sequence_id, grade_of(length), is_right=is_right)
                if not is_right:
                    break
                place, length = place + 1, length + 1
            else:
                hint = place
        self._num_seen = len(self._token_ids)
        self.match = self.index.find(hint)


class NgramProposer:
    """Implements `Proposer` without a model."""

    has_failed = False

    def __init__(self) -> None:
        self._book = AcceptanceBook(_PRIORS)
        self._lookups: dict[str, _Lookup] = {}

    def bind(self, request_behind: RequestBehind) -> None:
        """Nothing: how a token is drawn does not matter here."""

    def offer(self, decoding: Sequence[tuple[ScheduledSequence, int]], most: int) -> list[Rates]:
        return [self._rates(sequence, min(most, room)) for sequence, room in decoding]

    def seconds(self, depth: int) -> float:  # noqa: ARG002
        return 0.0

    def propose(self, counts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        proposals = {}
        for sequence_id, count in counts.items():
            lookup = self._lookups[sequence_id]
            if lookup.match is not None:
                proposals[sequence_id] = lookup.index.follow(lookup.match, count)
        return proposals

    def record(self, sequence: ScheduledSequence, num_proposed: int, num_accepted: int) -> None:
        """Nothing: what came is compared when the next proposal is looked up, verified or not."""

    def forget(self, sequence_id: str) -> None:
        self._lookups.pop(sequence_id, None)
        self._book.forget(sequence_id)

    def _rates(self, sequence: ScheduledSequence, most: int) -> Rates:
        sequence_id = sequence.sequence_id
        lookup = self._lookups.get(sequence_id)
        if lookup is None:
            lookup = self._lookups[sequence_id] = _Lookup(sequence.token_ids)
        lookup.advance(sequence_id, self._book)
        match = lookup.match
        if match is None:
            return ()
        return tuple(self._book.rate(sequence_id, grade_of(match.length + place)) for place in range(most))


def grade_of(length: int) -> int:
    """The grade of a token that follows a match of so many tokens."""
    return _GRADE_BY_LENGTH[min(length, _MAX_LENGTH)]
