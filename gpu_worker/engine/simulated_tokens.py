"""What the simulated engine says: a pure function of the context, so that a test can recompute any output. Pure."""

from collections.abc import Sequence
from enum import StrEnum
from hashlib import blake2b
from struct import Struct

from gpu_worker.engine.text import TokenTable
from service_kit.delta import EMPTY_CHAIN, TokenLogprob, extend_chain

PRINTABLE_BYTES = tuple(range(0x20, 0x7F))
"""Alphabet of a byte-level tokenizer in which token i is byte i, as simulated models have it."""


_NUMBERS = Struct("<QQQ")


class TokenMode(StrEnum):
    """What a simulated token depends on besides prompt, seed and all tokens before it."""

    PROMPT_HASH = "prompt_hash"
    """Nothing else: every attempt continues alike, as with greedy or seeded sampling."""
    NONCE = "nonce"
    """The attempt: every mixture of two attempts is visible in the output."""
    ECHO = "echo"
    """Only its position: the output says the prompt again and again, without BOS."""


def printable_alphabet(table: TokenTable) -> tuple[int, ...]:
    """Ids of the tokens that are one printable ASCII character, in id order."""
    return tuple(
        token_id
        for token_id in range(table.vocab_size)
        if len(text := table.bytes_of(token_id)) == 1 and text[0] in PRINTABLE_BYTES
    )


def context_hash(prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> int:
    """Hash of everything before the next token; `extend_chain(context, [token])` continues it."""
    return extend_chain(extend_chain(EMPTY_CHAIN, prompt_token_ids), output_token_ids)


def simulated_number(context: int, *, seed: int, nonce: int) -> int:
    """64 bits that decide the next token. `nonce` is 0 in mode `prompt_hash`."""
    return int.from_bytes(blake2b(_NUMBERS.pack(context, seed, nonce), digest_size=8).digest(), "little")


def simulated_token(context: int, *, seed: int, nonce: int, alphabet: Sequence[int] = PRINTABLE_BYTES) -> int:
    """The next token after `context`."""
    return alphabet[simulated_number(context, seed=seed, nonce=nonce) % len(alphabet)]


def echoed_token(prompt_token_ids: Sequence[int], position: int, *, bos_token_id: int | None) -> int:
    """Token `position` (from 0) of an output that repeats the prompt."""
    said = [token_id for token_id in prompt_token_ids if token_id != bos_token_id] or list(prompt_token_ids)
    return said[position % len(said)]


def certain_logprob(token_id: int, num_top: int | None) -> TokenLogprob | None:
    """Log probabilities of a token beside which no other is possible; None when none were asked for."""
    if num_top is None:
        return None
    return TokenLogprob(0.0, ((token_id, 0.0),) if num_top else ())


def expected_output(
    *,
    prompt_token_ids: Sequence[int],
    prior_output: Sequence[int],
    seed: int,
    nonce: int,
    count: int,
    alphabet: Sequence[int] = PRINTABLE_BYTES,
) -> list[int]:
    """The `count` tokens that one attempt generates behind `prior_output`, stop rules aside."""
    context = context_hash(prompt_token_ids, prior_output)
    output: list[int] = []
    for _ in range(count):
        token_id = simulated_token(context, seed=seed, nonce=nonce, alphabet=alphabet)
        output.append(token_id)
        context = extend_chain(context, [token_id])
    return output
