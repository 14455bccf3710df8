"""Sessions kept for entries that were skipped for long. Pure; the same rules stand in lua/entries.lua."""

from service_kit.ids import GenerationId, SessionId


class Earmarks:
    """Owner of the earmarks: at most one per session and per entry, each a lease that pops naming the session renew."""

    def __init__(self) -> None:
        self.entry_by_session: dict[SessionId, GenerationId] = {}
        self.until_us_by_session: dict[SessionId, int] = {}
        self.starving: GenerationId | None = None
        """The one entry whose session is closed to every class."""

    def set(self, session_id: SessionId, generation_id: GenerationId, until_us: int) -> None:
        """In the place of the session's earmark, if it has one."""
        self.entry_by_session[session_id] = generation_id
        self.until_us_by_session[session_id] = until_us

    def has_entry(self, generation_id: GenerationId) -> bool:
        return generation_id in self.entry_by_session.values()

    def expire(self, now_us: int) -> None:
        for session_id in [session for session, until_us in self.until_us_by_session.items() if until_us <= now_us]:
            self._release(session_id)

    def release_entry(self, generation_id: GenerationId) -> None:
        """The entry left, or is popped."""
        for session_id in [session for session, entry in self.entry_by_session.items() if entry == generation_id]:
            self._release(session_id)

    def _release(self, session_id: SessionId) -> None:
        if self.entry_by_session.pop(session_id) == self.starving:
            self.starving = None
        del self.until_us_by_session[session_id]
