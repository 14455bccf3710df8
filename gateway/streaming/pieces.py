"""What goes into one message of a stream. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from service_kit.delta import Cursor, Delta, extend_chain, join
from state_store.delta_log.port import LogEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Something to send: tokens, the end, or both. `cursor` is that of a reader that has it."""

    cursor: Cursor
    delta: Delta | None = None
    end: LogEnd | None = None


def cut_pieces(deltas: Iterable[Delta], *, end: Piece | None, max_tokens: int) -> Iterator[Piece]:
    """Deltas that continue each other, joined and cut to at most `max_tokens` each; `end` joins the last piece, or comes
    alone when there is none."""
    parts = list(deltas)
    whole = parts[0] if len(parts) == 1 else join(parts)
    pieces = [Piece(cursor=delta.end, delta=delta) for delta in _cut(whole, max_tokens)] if whole is not None else []
    if end is not None:
        last = pieces.pop() if pieces else end
        pieces.append(replace(last, end=end.end))
    yield from pieces


def _cut(delta: Delta, max_tokens: int) -> Iterator[Delta]:
    """Cut between tokens, so that each part ends at a cursor."""
    if len(delta.token_ids) <= max_tokens:
        yield delta
        return
    chain = delta.prev_chain
    for start in range(0, len(delta.token_ids), max_tokens):
        token_ids = delta.token_ids[start : start + max_tokens]
        following = extend_chain(chain, token_ids)
        yield Delta(
            first=delta.first + start,
            token_ids=token_ids,
            texts=delta.texts[start : start + max_tokens],
            prev_chain=chain,
            chain=following,
            logprobs=delta.logprobs[start : start + max_tokens],
        )
        chain = following
