"""Bytes of deltas, ends and pushes in the delta log (msgpack). Pure.

A delta ends with its log probabilities in `service_kit.logprob_codec`'s form where it has any; the others are as they were
before there were any, so that both kinds are read.

A push is put together by the scripts: [generation id, attempt, end, chain of the end as 8 bytes, delta or nil, end record
or nil]; a message is several pushes after one another.
"""

from typing import Any

import msgpack  # type: ignore[import-untyped]

from service_kit.delta import Cursor, Delta
from service_kit.ids import GenerationId
from service_kit.logprob_codec import pack_logprobs, unpack_logprobs
from service_kit.sampling import FinishReason
from state_store.delta_log.port import LogEnd, Push
from state_store.model import State

CHAIN_BYTES = 8


def pack_chain(chain: int) -> bytes:
    return chain.to_bytes(CHAIN_BYTES, "big")


def unpack_chain(packed: bytes) -> int:
    return int.from_bytes(packed, "big")


def pack_delta(delta: Delta) -> bytes:
    fields = (delta.first, delta.token_ids, delta.texts, delta.prev_chain, delta.chain)
    logprobs = (pack_logprobs(delta.logprobs),) if delta.logprobs else ()
    return bytes(msgpack.packb((*fields, *logprobs)))


def unpack_delta(packed: bytes) -> Delta:
    return _delta(msgpack.unpackb(packed))


def pack_end(end: LogEnd) -> bytes:
    fields = (
        end.state,
        end.output_tokens,
        end.prompt_tokens,
        end.cached_prompt_tokens,
        end.finish_reason,
        end.matched_stop,
        end.error_reason,
        end.error_message,
    )
    return bytes(msgpack.packb(fields))


def unpack_end(packed: bytes) -> LogEnd:
    return _end(msgpack.unpackb(packed))


def unpack_pushes(message: bytes) -> tuple[Push, ...]:
    unpacker = msgpack.Unpacker(max_buffer_size=len(message) or 1)
    unpacker.feed(message)
    return tuple(_push(fields) for fields in unpacker)


def _push(fields: list[Any]) -> Push:
    generation_id, attempt, sequence_number, chain, delta, terminal = fields
    return Push(
        generation_id=GenerationId(generation_id),
        attempt=attempt,
        end=Cursor(sequence_number=sequence_number, chain=unpack_chain(chain)),
        delta=None if delta is None else _delta(delta),
        terminal=None if terminal is None else _end(terminal),
    )


def _delta(fields: list[Any]) -> Delta:
    first, token_ids, texts, prev_chain, chain, *logprobs = fields
    return Delta(
        first=first,
        token_ids=tuple(token_ids),
        texts=tuple(texts),
        prev_chain=prev_chain,
        chain=chain,
        logprobs=unpack_logprobs(logprobs[0]) if logprobs else (),
    )


def _end(fields: list[Any]) -> LogEnd:
    state, output_tokens, prompt_tokens, cached_prompt_tokens, finish_reason, *rest = fields
    matched_stop, error_reason, error_message = rest
    return LogEnd(
        state=State(state),
        output_tokens=output_tokens,
        prompt_tokens=prompt_tokens,
        cached_prompt_tokens=cached_prompt_tokens,
        finish_reason=None if finish_reason is None else FinishReason(finish_reason),
        matched_stop=matched_stop,
        error_reason=error_reason,
        error_message=error_message,
    )
