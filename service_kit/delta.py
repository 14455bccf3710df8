"""Numbered output tokens and the chain that proves which output they continue.

Pure: every service imports this, none of it reads a clock or a socket.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from struct import Struct

EMPTY_CHAIN = 0
"""Chain of an output of no tokens."""

_LINK = Struct("<QI")
"""A chain and the token id that continues it."""


def extend_chain(chain: int, token_ids: Iterable[int]) -> int:
    """Running 64-bit hash of output token ids: `chain` continued by `token_ids`.

    blake2b (RFC 7693) with an 8-byte digest over the previous chain and the id, once per token, so that the chain at a
    position depends on the ids alone and not on how they were cut into deltas.
    """
    for token_id in token_ids:
        chain = int.from_bytes(blake2b(_LINK.pack(chain, token_id), digest_size=8).digest(), "little")
    return chain


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """What a reader already has: the last sequence number and the chain of the output up to it."""

    sequence_number: int = 0
    chain: int = EMPTY_CHAIN


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log probabilities at one position, of the model's raw distribution.

    `logprob` is the output token's, `top` the most probable tokens as (token id, logprob), most probable first, equals in
    id order. Values are exact in 32 bits.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Output tokens `first .. last`, numbered from 1.

    `texts[i]` is the text that token `token_ids[i]` adds; a token that ends inside a character adds none. `logprobs` has
    one entry per token when they were asked for, none otherwise. `prev_chain` is the chain before `first`, `chain` the one
    after `last`. Never empty.
    """

    first: int
    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    prev_chain: int
    chain: int
    logprobs: tuple[TokenLogprob, ...] = ()

    def __post_init__(self) -> None:
        if self.first < 1 or not self.token_ids or len(self.texts) != len(self.token_ids):
            raise ValueError("a delta has a first number of at least 1, tokens, and one text per token")
        if self.logprobs and len(self.logprobs) != len(self.token_ids):
            raise ValueError("a delta has log probabilities for all of its tokens or for none")

    @property
    def last(self) -> int:
        return self.first + len(self.token_ids) - 1

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def end(self) -> Cursor:
        """The cursor of a reader that has this delta."""
        return Cursor(sequence_number=self.last, chain=self.chain)


def make_delta(
    *, after: Cursor, token_ids: Iterable[int], texts: Iterable[str], logprobs: Iterable[TokenLogprob] = ()
) -> Delta:
    """The delta that continues `after`; computes its chain."""
    ids = tuple(token_ids)
    return Delta(
        first=after.sequence_number + 1,
        token_ids=ids,
        texts=tuple(texts),
        prev_chain=after.chain,
        chain=extend_chain(after.chain, ids),
        logprobs=tuple(logprobs),
    )


class ChainMismatchError(Exception):
    """The output does not continue what the reader has: another output stands at the reader's position."""


def rest_after(cursor: Cursor, delta: Delta) -> Delta | None:
    """The part of `delta` behind `cursor`, or None when the reader has all of it.

    Precondition: `delta.first <= cursor.sequence_number + 1` (no gap; a gap is the caller's business).
    Raises ChainMismatchError when the delta, at the cursor's position, has another chain. A delta that lies wholly before
    the cursor is only comparable at its own end.
    """
    if delta.first > cursor.sequence_number + 1:
        raise ValueError("the delta leaves a gap behind the cursor")
    known = cursor.sequence_number - delta.first + 1
    if known > len(delta.token_ids):
        return None
    if extend_chain(delta.prev_chain, delta.token_ids[:known]) != cursor.chain:
        raise ChainMismatchError(f"another output stands at sequence number {cursor.sequence_number}")
    if known == len(delta.token_ids):
        return None
    if known == 0:
        return delta
    return Delta(
        first=cursor.sequence_number + 1,
        token_ids=delta.token_ids[known:],
        texts=delta.texts[known:],
        prev_chain=cursor.chain,
        chain=delta.chain,
        logprobs=delta.logprobs[known:],
    )


def join(deltas: Iterable[Delta]) -> Delta | None:
    """One delta for several that continue each other; None for none. Raises ValueError where they do not.

    Log probabilities are kept when all parts have them: an attempt may have run on a worker of a version without them.
    """
    parts = list(deltas)
    if not parts:
        return None
    for left, right in pairwise(parts):
        if right.first != left.last + 1 or right.prev_chain != left.chain:
            raise ValueError(f"sequence number {right.first} does not continue {left.last}")
    has_logprobs = all(part.logprobs for part in parts)
    return Delta(
        first=parts[0].first,
        token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
        texts=tuple(text for part in parts for text in part.texts),
        prev_chain=parts[0].prev_chain,
        chain=parts[-1].chain,
        logprobs=tuple(logprob for part in parts for logprob in part.logprobs) if has_logprobs else (),
    )
