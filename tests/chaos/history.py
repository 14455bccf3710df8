"""What happened in one trial, as plain values: what the clients saw, and what the database says afterwards. Pure."""

from dataclasses import dataclass, field

from service_kit.delta import EMPTY_CHAIN, Cursor, extend_chain

FINAL_STATES = frozenset({"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a request asked for. `text` is the prompt."""

    request_id: str
    text: str
    max_output_tokens: int
    stop: str | None = None
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens that one client got in one event. `end` is the cursor that came with them, `at_s` when they came."""

    token_ids: tuple[int, ...]
    text: str
    end: Cursor
    at_s: float = 0.0

    @property
    def first(self) -> int:
        return self.end.sequence_number - len(self.token_ids) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The error that ended a visit. `kind` is the class, `reason` the service's word."""

    kind: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The client's Finished."""

    finish_reason: str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One stream of one client, from `start`. It ends with `ending`, with `failure`, or with neither: the client left.
    Visits of one `reader` follow each other in time; each begins where the one before ended."""

    request_id: str
    reader: str = ""
    start: Cursor = Cursor()
    accepted_ids: tuple[str, ...] = ()
    pieces: tuple[Piece, ...] = ()
    ending: Ending | None = None
    failure: Failure | None = None
    longest_pause_s: float = 0.0
    first_token_s: float | None = None

    @property
    def cursor(self) -> Cursor:
        return self.pieces[-1].end if self.pieces else self.start

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token_id for piece in self.pieces for token_id in piece.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRow:
    """The durable record."""

    generation_id: str
    request_id: str
    state: str
    attempt: int
    prompt_token_ids: tuple[int, ...]
    seed: int
    temperature: float
    finish_reason: str | None
    error_reason: str | None
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """One execution. `end_position` is None while unknown."""

    generation_id: str
    attempt: int
    session_id: str
    nonce: int
    outcome: str | None
    end_position: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRow:
    """Stored output, with one text per token."""

    generation_id: str
    first: int
    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    prev_chain: int
    chain: int

    @property
    def last(self) -> int:
        return self.first + len(self.token_ids) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    generation_id: str
    state: str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantRow:
    """What stood in the session's row when a grant was committed, and who committed it."""

    generation_id: str
    attempt: int
    session_id: str
    granter: str
    owner: str
    owner_epoch: int
    session_state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Everything the oracle looks at. `can_lose_output`: the log was emptied and the worker died, so that DATA_LOSS may
    be the truth. `changed_after_end` are generations whose final row was written once more."""

    wishes: tuple[Wish, ...]
    visits: tuple[Visit, ...]
    generations: tuple[GenerationRow, ...]
    attempts: tuple[AttemptRow, ...]
    chunks: tuple[ChunkRow, ...]
    ledger: tuple[LedgerRow, ...]
    grants: tuple[GrantRow, ...] = ()
    changed_after_end: tuple[str, ...] = ()
    can_lose_output: bool = False


@dataclass(slots=True)
class Output:
    """The stored output of one generation, joined, with the chain behind every position."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    chains: list[int] = field(default_factory=lambda: [EMPTY_CHAIN])

    def add(self, token_ids: tuple[int, ...], texts: tuple[str, ...]) -> None:
        for token_id in token_ids:
            self.chains.append(extend_chain(self.chains[-1], [token_id]))
        self.token_ids.extend(token_ids)
        self.texts.extend(texts)

    def continues(self, cursor: Cursor) -> bool:
        """Whether a reader at `cursor` has the beginning of this output."""
        number = cursor.sequence_number
        return number < len(self.chains) and self.chains[number] == cursor.chain
