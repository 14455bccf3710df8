"""Lua scripts kept one per file, sent by their hash."""

from collections.abc import Sequence
from hashlib import sha1
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

Argument = bytes | str | int


class LuaScript:
    """One script, put together from `parts` in order; loads itself where the server does not know it (yet, or any more)."""

    def __init__(self, *parts: Path) -> None:
        self._source = "\n".join(part.read_text(encoding="utf-8") for part in parts)
        self._sha = sha1(self._source.encode(), usedforsecurity=False).hexdigest()

    async def run(self, client: Redis, keys: Sequence[str], arguments: Sequence[Argument]) -> Any:
        values: list[Any] = [*keys, *arguments]
        try:
            return await client.evalsha(self._sha, len(keys), *values)
        except NoScriptError:
            return await client.eval(self._source, len(keys), *values)
