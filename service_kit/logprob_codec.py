"""Log probabilities as bytes: one form in the delta log, in chunk rows and between the worker's processes. Pure.

A msgpack array with one array per token: `[logprob, id, logprob, id, logprob, ...]`, the token's own first, then the most
probable tokens. Numbers are 32-bit floats, so that what the engine gave comes back bit by bit. About 9 bytes per value.
"""

from collections.abc import Iterable
from itertools import chain

import msgpack  # type: ignore[import-untyped]

from service_kit.delta import TokenLogprob


def pack_logprobs(logprobs: Iterable[TokenLogprob]) -> bytes:
    fields = [[each.logprob, *chain.from_iterable(each.top)] for each in logprobs]
    return bytes(msgpack.packb(fields, use_single_float=True))


def unpack_logprobs(packed: bytes) -> tuple[TokenLogprob, ...]:
    """What was packed. Raises ValueError, IndexError or TypeError for bytes that are no such array."""
    return tuple(
        TokenLogprob(fields[0], tuple(zip(fields[1::2], fields[2::2], strict=True)))
        for fields in msgpack.unpackb(packed)
    )
