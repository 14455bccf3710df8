"""What a stream of the client yields, what a caller asks for, and the check that a stream continues. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from service_kit.delta import Cursor, extend_chain
from service_kit.errors import DataLossError, UnavailableError
from service_kit.sampling import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation; roles as the model's template knows them."""

    role: str
    content: str


Input = str | Sequence[Message] | Sequence[int]
"""Plain text, a conversation, or token ids. An empty sequence is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling wishes; None leaves a value to the server's default. Ranges and meanings stand in inference/v1/types.proto.

    logit_bias: token id → what is added to its logit. logprobs: how many of the most probable tokens come with every
    output token, beside its own log probability.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_output_tokens: int | None = None
    min_output_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The generation is committed: from now on it ends in exactly one final state. Once, first."""

    generation_id: str
    request_id: str
    is_created: bool
    state: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprob:
    """One of the most probable tokens at a position; `token` is the bytes that it stands for."""

    token_id: int
    token: bytes
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """The natural log probability of one output token, and the most probable tokens there, most probable first.

    `token` is the bytes that the output token stands for: perhaps a part of a character. Empty for special tokens.
    """

    token_id: int
    token: bytes
    logprob: float
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """New tokens. `cursor` is where a reader stands that has this event. `logprobs` has one entry per token when they were
    asked for, otherwise none."""

    token_ids: tuple[int, ...]
    text: str
    cursor: Cursor
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconnecting:
    """The stream broke; the client comes back after `delay_s` and continues at the next token. For display only."""

    failures: int
    delay_s: float
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The output is complete. Once, last."""

    finish_reason: FinishReason
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    matched_stop: str | None


Event = Accepted | Output | Reconnecting | Finished


class StreamBrokenError(DataLossError):
    """The server sent output that does not continue what this client has. Never retried: the text would be wrong."""


class GaveUpError(UnavailableError):
    """The service did not come back in time. The generation may go on: `request_id` and `cursor` continue it later."""

    def __init__(self, message: str, *, reason: str, request_id: str, cursor: Cursor) -> None:
        super().__init__(message, reason=reason)
        self.request_id = request_id
        self.cursor = cursor


def continue_from(cursor: Cursor, *, first: int, token_ids: Sequence[int], end: Cursor) -> Cursor:
    """The cursor behind tokens numbered from `first`. Raises StreamBrokenError unless they continue `cursor`, end at `end`."""
    if first != cursor.sequence_number + 1:
        raise StreamBrokenError(f"expected token {cursor.sequence_number + 1} next, the server sent {first}")
    reached = Cursor(
        sequence_number=cursor.sequence_number + len(token_ids), chain=extend_chain(cursor.chain, token_ids)
    )
    if reached != end:
        raise StreamBrokenError(f"the tokens up to {reached.sequence_number} are not those that the server counts on")
    return reached
