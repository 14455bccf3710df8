"""The output stage of one sequence: token ids in, numbered deltas with text out, ended by stop rules. No torch.

Each token costs constant time and memory. Text is decoded incrementally; what may turn out to be the beginning of a stop
string is held back until it is decided, unless the stop string belongs to the output.
"""

from codecs import utf_8_decode
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_worker.engine.stop_strings import StopHit, StopMatcher
from service_kit.delta import EMPTY_CHAIN, Cursor, Delta, TokenLogprob, extend_chain
from service_kit.sampling import SamplingParams
from service_kit.token_bytes import read_token_bytes

_NO_TOKENS: frozenset[int] = frozenset()


class TokenTable:
    """The bytes of every token of one tokenizer; immutable, shared by all sequences."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._bytes = tuple(token_bytes)
        self._texts = tuple(_text_of(piece) for piece in self._bytes)

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

    def decode(self, token_id: int, pending: bytes) -> tuple[str, bytes]:
        """The text that a token adds behind `pending`, the bytes of an incomplete character, and what is pending then.

        Invalid bytes become U+FFFD as the Unicode Standard recommends (chapter 3.9, maximal subparts).
        """
        if not pending and 0 <= token_id < len(self._texts):
            text = self._texts[token_id]
            if text is not None:
                return text, b""
        data = pending + self.bytes_of(token_id)
        text, length = utf_8_decode(data, "replace", False)
        return text, data[length:]


def _text_of(piece: bytes) -> str | None:
    """None when it ends inside a character."""
    text, length = utf_8_decode(piece, "replace", False)
    return text if length == len(piece) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """What ends an output: a stop string in the text, or an end token (EOS, stop ids), which is not numbered.

    include_stop: the output ends behind the stop string instead of before it.
    The first `min_output_tokens` tokens end nothing: end tokens among them are ordinary tokens, and stop strings are
    looked for in the text behind them. So the output has at least that many tokens, with include_stop or without.
    """

    stop: tuple[str, ...] = ()
    end_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    min_output_tokens: int = 0

    @classmethod
    def from_sampling(cls, sampling: SamplingParams, eos_token_ids: Iterable[int]) -> "StopRules":
        eos = _NO_TOKENS if sampling.ignore_eos else frozenset(eos_token_ids)
        return cls(
            stop=sampling.stop,
            end_token_ids=eos | frozenset(sampling.stop_token_ids),
            include_stop=sampling.include_stop,
            min_output_tokens=sampling.min_output_tokens,
        )

    def banned_at(self, position: int) -> frozenset[int]:
        """What must not be drawn as token number `position`, from 1: end tokens while the output is too short."""
        return self.end_token_ids if position <= self.min_output_tokens else _NO_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """Why the output ended: the stop string, or None for an end token."""

    matched_stop: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """What one token caused: the tokens that are now numbered, and the end if this was it."""

    delta: Delta | None = None
    stop: StopMatch | None = None


_NOTHING = Emission()


@dataclass(slots=True)
class _Held:
    """A token not yet numbered; its text begins at character `start` of the text behind the first min_output_tokens."""

    token_id: int
    text: str
    logprob: TokenLogprob | None
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


class OutputStage:
    """Numbers the output tokens of one attempt.

    `prior_output`, the numbered output of earlier attempts, is replayed silently: decoder, stop matching, numbering and
    chain end as if it had been pushed. What an earlier attempt held back was never numbered and is generated again.

    Of several matches the one that is complete first counts, of several complete at once the longest. The output ends
    where the match begins; with include_stop where it ends, so that nothing has to be held back: whatever match comes,
    the text before its end stays. A token is numbered iff text of it lies before the end of the output (it is cut
    there), or, adding no text itself, iff it lies before the token that holds the first (with include_stop: the last)
    character of the match.

    Log probabilities travel with their tokens: give one with every token or with none.
    """

    def __init__(self, table: TokenTable, rules: StopRules, *, prior_output: Sequence[int] = ()) -> None:
        self._table = table
        self.rules = rules
        self._matcher = StopMatcher(rules.stop) if rules.stop else None
        self._pending = b""
        self._held: deque[_Held] = deque()
        self._num_chars = 0
        self._stop: StopMatch | None = None
        self._num_numbered = len(prior_output)
        self._chain = extend_chain(EMPTY_CHAIN, prior_output)
        for number, token_id in enumerate(prior_output, start=1):
            text = self._decode(token_id)
            if number > rules.min_output_tokens and self._find_stop(text) is not None:
                # The last numbered token can contain the match that cut it: the output had ended, and says so at once.
                break

    @property
    def cursor(self) -> Cursor:
        """Of the last numbered token."""
        return Cursor(sequence_number=self._num_numbered, chain=self._chain)

    @property
    def num_generated(self) -> int:
        """Numbered and held tokens, prior output included."""
        return self._num_numbered + len(self._held)

    @property
    def stop(self) -> StopMatch | None:
        """The end, once it was found; a resumed output can have it from the start."""
        return self._stop

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> Emission:
        """Takes the next token. After the end it changes nothing and repeats the end."""
        if self._stop is not None:
            return Emission(stop=self._stop)
        rules = self.rules
        can_end = self.num_generated >= rules.min_output_tokens
        if can_end and token_id in rules.end_token_ids:
            self._stop = StopMatch(matched_stop=None)
            return Emission(delta=self._number_held(self._take_held()), stop=self._stop)
        text = self._decode(token_id)
        matcher = self._matcher
        if matcher is None or not can_end:
            return Emission(delta=self._number((token_id,), (text,), (logprob,)))
        start = self._num_chars
        hit = self._find_stop(text)
        if rules.include_stop or not (hit or self._held or matcher.num_undecided):
            kept = text if hit is None else text[: hit.end]
            return Emission(delta=self._number((token_id,), (kept,), (logprob,)), stop=self._stop)
        self._held.append(_Held(token_id, text, logprob, start))
        if hit is not None:
            cut = self._cut(start + hit.end - len(hit.pattern))
            return Emission(delta=self._number_held(cut), stop=self._stop)
        released = self._release(self._num_chars - matcher.num_undecided)
        return Emission(delta=self._number_held(released)) if released else _NOTHING

    def flush(self) -> Emission:
        """Numbers what is held: the output ends for another reason. An incomplete character adds no text."""
        return Emission(delta=self._number_held(self._take_held()), stop=self._stop)

    def _decode(self, token_id: int) -> str:
        text, self._pending = self._table.decode(token_id, self._pending)
        return text

    def _find_stop(self, text: str) -> StopHit | None:
        """Moves stop matching over `text`; a hit sets the end."""
        self._num_chars += len(text)
        hit = self._matcher.feed(text) if self._matcher is not None else None
        if hit is not None:
            self._stop = StopMatch(matched_stop=hit.pattern)
        return hit

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
            first.text = first.text[: position - first.start]
            kept.append(first)
        self._held.clear()
        return kept

    def _take_held(self) -> list[_Held]:
        taken = list(self._held)
        self._held.clear()
        return taken

    def _number_held(self, tokens: Sequence[_Held]) -> Delta | None:
        if not tokens:
            return None
        return self._number(
            tuple(token.token_id for token in tokens),
            tuple(token.text for token in tokens),
            tuple(token.logprob for token in tokens),
        )

    def _number(
        self, token_ids: tuple[int, ...], texts: tuple[str, ...], logprobs: tuple[TokenLogprob | None, ...]
    ) -> Delta:
        has_logprobs = logprobs[0] is not None
        delta = Delta(
            first=self._num_numbered + 1,
            token_ids=token_ids,
            texts=texts,
            prev_chain=self._chain,
            chain=extend_chain(self._chain, token_ids),
            logprobs=tuple(logprob for logprob in logprobs if logprob is not None) if has_logprobs else (),
        )
        self._num_numbered += len(token_ids)
        self._chain = delta.chain
        return delta
