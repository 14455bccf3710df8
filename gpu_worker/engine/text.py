"""The output stage of one sequence: token ids in, numbered deltas with text out, ended by stop rules. No torch.

Each token costs constant time and memory. Text is decoded incrementally; what may turn out to be the beginning of a stop
string is held back until it is decided.
"""

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_worker.engine.token_bytes import read_token_bytes
from service_kit.delta import Cursor, Delta, extend_chain, make_delta
from service_kit.sampling import SamplingParams

_new_decoder = codecs.getincrementaldecoder("utf-8")


class TokenTable:
    """The bytes of every token of one tokenizer; immutable, shared by all sequences."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._bytes = tuple(token_bytes)

    @classmethod
    def from_directory(cls, directory: Path) -> "TokenTable":
        """Reads `tokenizer.json`. Raises UnsupportedTokenizerError."""
        return cls(read_token_bytes(directory))

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    def bytes_of(self, token_id: int) -> bytes:
        """Ids at and beyond `vocab_size` pad the model's embedding and stand for no text."""
        if token_id < 0:
            raise ValueError(f"token id {token_id} is negative")
        return self._bytes[token_id] if token_id < len(self._bytes) else b""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """What ends an output: a stop string in the text, or an end token (EOS, stop ids), which is not numbered."""

    stop: tuple[str, ...] = ()
    end_token_ids: frozenset[int] = frozenset()

    @classmethod
    def from_sampling(cls, sampling: SamplingParams, eos_token_ids: Iterable[int]) -> "StopRules":
        eos = frozenset[int]() if sampling.ignore_eos else frozenset(eos_token_ids)
        return cls(stop=sampling.stop, end_token_ids=eos | frozenset(sampling.stop_token_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """Why the output ended: the stop string, or None for an end token."""

    matched_stop: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """What one token caused: the tokens that are now numbered, and the end if this was it."""

    delta: Delta | None = None
    stop: StopMatch | None = None


@dataclass(frozen=True, slots=True)
class _Held:
    """A token not yet numbered; its text takes the characters `start` to `end` of the output."""

    token_id: int
    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


class _StopString:
    """One stop string's automaton (Knuth, Morris, Pratt 1977).

    `matched` is the length of its longest prefix that the text ends with.
    """

    __slots__ = ("_fallback", "matched", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0
        self._fallback = [0] * (len(pattern) + 1)
        length = 0
        for index in range(1, len(pattern)):
            while length and pattern[index] != pattern[length]:
                length = self._fallback[length]
            length += pattern[index] == pattern[length]
            self._fallback[index + 1] = length

    def feed(self, character: str) -> bool:
        """True when the pattern is complete with this character."""
        matched = self.matched
        if matched == len(self.pattern):
            matched = self._fallback[matched]
        while matched and self.pattern[matched] != character:
            matched = self._fallback[matched]
        self.matched = matched + (self.pattern[matched] == character)
        return self.matched == len(self.pattern)


class OutputStage:
    """Numbers the output tokens of one attempt.

    `prior_output`, the numbered output of earlier attempts, is replayed silently: decoder, stop matching, numbering and
    chain end as if it had been pushed. What an earlier attempt held back was never numbered and is generated again.

    A token is numbered iff text of it lies before the stop match (it is cut there), or, adding no text itself, iff it
    lies before the token in which the match begins. Of several matches the one that is complete first counts.
    """

    def __init__(self, table: TokenTable, rules: StopRules, *, prior_output: Sequence[int] = ()) -> None:
        self._table = table
        self._end_token_ids = rules.end_token_ids
        self._decoder = _new_decoder("replace")
        self._stops = [_StopString(pattern) for pattern in rules.stop]
        self._held: deque[_Held] = deque()
        self._num_chars = 0
        self._stop: StopMatch | None = None
        self._cursor = Cursor(sequence_number=len(prior_output), chain=extend_chain(0, prior_output))
        for token_id in prior_output:
            # The last numbered token can contain the match that cut it: then the output had ended, and says so at once.
            self._advance(self._decoder.decode(table.bytes_of(token_id)))

    @property
    def cursor(self) -> Cursor:
        """Of the last numbered token."""
        return self._cursor

    @property
    def num_generated(self) -> int:
        """Numbered and held tokens, prior output included."""
        return self._cursor.sequence_number + len(self._held)

    @property
    def stop(self) -> StopMatch | None:
        """The end, once it was found; a resumed output can have it from the start."""
        return self._stop

    def push(self, token_id: int) -> Emission:
        """Takes the next token. After the end it changes nothing and repeats the end."""
        if self._stop is not None:
            return Emission(stop=self._stop)
        if token_id in self._end_token_ids:
            self._stop = StopMatch(matched_stop=None)
            return Emission(delta=self._number(self._take_held()), stop=self._stop)
        text = self._decoder.decode(self._table.bytes_of(token_id))
        self._held.append(_Held(token_id, text, self._num_chars))
        match_start = self._advance(text)
        if match_start is not None:
            return Emission(delta=self._number(self._cut(match_start)), stop=self._stop)
        undecided_from = self._num_chars - max((stop.matched for stop in self._stops), default=0)
        return Emission(delta=self._number(self._release(undecided_from)))

    def flush(self) -> Emission:
        """Numbers what is held: the output ends for another reason. An incomplete character adds no text."""
        return Emission(delta=self._number(self._take_held()), stop=self._stop)

    def _advance(self, text: str) -> int | None:
        """Moves the stop automata over `text`; at the first complete match sets the end and returns where it begins."""
        if not self._stops:
            self._num_chars += len(text)
            return None
        for character in text:
            self._num_chars += 1
            complete = [stop.pattern for stop in self._stops if stop.feed(character)]
            if complete and self._stop is None:
                longest = max(complete, key=len)
                self._stop = StopMatch(matched_stop=longest)
                return self._num_chars - len(longest)
        return None

    def _release(self, position: int) -> list[_Held]:
        """Held tokens that lie wholly before character `position`."""
        released = []
        while self._held and self._held[0].end <= position:
            released.append(self._held.popleft())
        return released

    def _cut(self, position: int) -> list[_Held]:
        """What is numbered of the held tokens at a match that begins at `position`; the others are dropped for good."""
        kept = self._release(position)
        if self._held and self._held[0].start < position:
            first = self._held[0]
            kept.append(_Held(first.token_id, first.text[: position - first.start], first.start))
        self._held.clear()
        return kept

    def _take_held(self) -> list[_Held]:
        taken = list(self._held)
        self._held.clear()
        return taken

    def _number(self, tokens: Sequence[_Held]) -> Delta | None:
        if not tokens:
            return None
        delta = make_delta(
            after=self._cursor,
            token_ids=[token.token_id for token in tokens],
            texts=[token.text for token in tokens],
        )
        self._cursor = delta.end
        return delta
