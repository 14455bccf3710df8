"""A few at a time of each name; the others wait in order."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """At most `max_at_once` holders of each name. Remembers only names that somebody holds or waits for."""

    def __init__(self, max_at_once: int) -> None:
        self._max_at_once = max_at_once
        self._semaphores: dict[str, asyncio.Semaphore] = {}
        self._users: dict[str, int] = {}

    @asynccontextmanager
    async def take(self, name: str) -> AsyncIterator[None]:
        semaphore = self._semaphores.setdefault(name, asyncio.Semaphore(self._max_at_once))
        self._users[name] = self._users.get(name, 0) + 1
        try:
            async with semaphore:
                yield
        finally:
            self._users[name] -= 1
            if self._users[name] == 0:
                del self._users[name], self._semaphores[name]
