"""What a Redis or Valkey must be set to, asked once at the start: what would lose data is refused, not found out later."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from service_kit.logging import get_logger
from state_store.delta_log.connection import is_unavailable
from state_store.errors import LogUnavailableError

_log = get_logger()

_NAMES = ("appendonly", "appendfsync", "maxmemory-policy")


class UnsafeRedisError(Exception):
    """The server would lose what it was told to keep. The message is one line for whoever starts the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSafety:
    """Settings of a server; None where it does not say."""

    appendonly: str | None = None
    appendfsync: str | None = None
    maxmemory_policy: str | None = None

    @property
    def dangers(self) -> list[str]:
        """What loses data in the course of operation."""
        found = []
        if self.appendonly == "no":
            found.append("appendonly is no (a restart loses the live output): set it to yes")
        if self.maxmemory_policy not in (None, "noeviction"):
            found.append(
                f"maxmemory-policy is {self.maxmemory_policy} (queues and logs are evicted): set it to noeviction"
            )
        return found

    @property
    def doubts(self) -> list[str]:
        """What may lose the newest writes when the machine fails, and what could not be asked."""
        values = {"appendonly": self.appendonly, "maxmemory-policy": self.maxmemory_policy}
        found = [f"{name} cannot be asked" for name, value in values.items() if value is None]
        if self.appendfsync == "no":
            found.append("appendfsync is no (a crash of the machine loses about 30 s): set it to everysec or always")
        return found


async def check_redis(client: Redis, *, allow_unsafe: bool) -> None:
    """Raises UnsafeRedisError for a server that would lose data, unless that is allowed, and LogUnavailableError when it
    does not answer. Doubts are logged."""
    safety = await read_safety(client)
    for doubt in safety.doubts:
        _log.warning("redis_may_lose_writes", problem=doubt)
    if not safety.dangers:
        return
    problem = "; ".join(safety.dangers)
    if not allow_unsafe:
        raise UnsafeRedisError(f"Redis would lose data: {problem} (or accept it with SLUICE_ALLOW_UNSAFE_REDIS=true)")
    _log.warning("redis_is_unsafe", problem=problem)


async def wait_for_safe_redis(client: Redis, *, allow_unsafe: bool, poll_s: float = 0.5) -> None:
    """As `check_redis`, once the server answers: until then it is asked again and again."""
    while True:
        try:
            await check_redis(client, allow_unsafe=allow_unsafe)
        except LogUnavailableError as error:
            _log.info("waiting_for_redis", problem=error.message)
            await asyncio.sleep(poll_s)
        else:
            return


async def read_safety(client: Redis) -> RedisSafety:
    """CONFIG GET; where that is forbidden or absent, what INFO tells. Raises LogUnavailableError."""
    try:
        values = await _ask_config(client)
        if values is None:
            values = await _ask_info(client)
    except RedisError as error:
        if not is_unavailable(error):
            raise
        raise LogUnavailableError(f"Redis cannot be reached: {type(error).__name__}") from error
    return RedisSafety(
        appendonly=values.get("appendonly"),
        appendfsync=values.get("appendfsync"),
        maxmemory_policy=values.get("maxmemory-policy"),
    )


async def _ask_config(client: Redis) -> dict[str, str] | None:
    """None where CONFIG may not be asked."""
    values: dict[str, str] = {}
    for name in _NAMES:
        reply = await _permitted(client.config_get(name))
        if reply is None:
            return None
        values |= {_text(key): _text(value) for key, value in reply.items()}
    return values


async def _ask_info(client: Redis) -> dict[str, str]:
    persistence = await _permitted(client.info("persistence")) or {}
    memory = await _permitted(client.info("memory")) or {}
    known: dict[str, str] = {}
    if "aof_enabled" in persistence:
        known["appendonly"] = "yes" if persistence["aof_enabled"] else "no"
    if "maxmemory_policy" in memory:
        known["maxmemory-policy"] = memory["maxmemory_policy"]
    return known


async def _permitted(answer: Awaitable[Any]) -> Any:
    """None where the server refuses the command itself."""
    try:
        return await answer
    except ResponseError as error:
        if is_unavailable(error):
            raise
        return None


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
