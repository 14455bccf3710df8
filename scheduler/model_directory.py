"""Which models have workers, and what the largest of these can hold; as Postgres knows it, whichever scheduler owns them."""

from collections.abc import Callable
from dataclasses import dataclass

from service_kit.ids import SessionId
from state_store.model import ModelKey, SessionRecord, SessionState
from state_store.ports import SessionStore

KEPT_S = 1.0
"""How long what was read is believed."""
KEPT_WITHOUT_S = 0.1
"""The same for the news that a model has no worker, so that the first one is noticed at once."""
REMEMBERED_S = 30.0
"""How long a model whose workers are all gone counts as served: a worker that restarts refuses nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSizes:
    """What one session can hold at most."""

    context_length: int
    capacity_tokens: int

    def can_hold(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens, output included, could ever run there."""
        return num_tokens <= min(self.context_length, self.capacity_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    model_key: ModelKey
    sizes: SessionSizes
    at_s: float


class ModelDirectory:
    """One per scheduler process. `clock` is monotonic seconds."""

    def __init__(self, *, store: SessionStore, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._seen: dict[SessionId, _Seen] = {}
        self._read_at_s: float | None = None

    async def sizes_of(self, model_key: ModelKey) -> list[SessionSizes]:
        """Of the sessions of the model that live, or did within the last 30 s; empty when it has no worker. Raises
        StoreUnavailableError."""
        if self._is_older_than(KEPT_S):
            await self._read()
        sizes = self._sizes_of(model_key)
        if not sizes and self._is_older_than(KEPT_WITHOUT_S):
            await self._read()
            sizes = self._sizes_of(model_key)
        return sizes

    def note(self, session: SessionRecord) -> None:
        """A live session was seen."""
        sizes = SessionSizes(
            context_length=session.context_length, capacity_tokens=session.num_blocks * session.block_size
        )
        self._seen[session.session_id] = _Seen(model_key=session.model_key, sizes=sizes, at_s=self._clock())

    def _is_older_than(self, age_s: float) -> bool:
        return self._read_at_s is None or self._clock() - self._read_at_s >= age_s

    def _sizes_of(self, model_key: ModelKey) -> list[SessionSizes]:
        oldest_s = self._clock() - REMEMBERED_S
        return [seen.sizes for seen in self._seen.values() if seen.model_key == model_key and seen.at_s >= oldest_s]

    async def _read(self) -> None:
        sessions = await self._store.list_sessions()
        self._read_at_s = self._clock()
        for session in sessions:
            if session.state is SessionState.LIVE:
                self.note(session)
        oldest_s = self._read_at_s - REMEMBERED_S
        self._seen = {session_id: seen for session_id, seen in self._seen.items() if seen.at_s >= oldest_s}
