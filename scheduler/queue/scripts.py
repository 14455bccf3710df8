"""The queue's scripts, and the arguments of the one that decides."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from scheduler.queue.bounds import RATE_WINDOW
from scheduler.queue.codec import duration_us
from scheduler.queue.port import SessionRoom
from scheduler.queue.settings import QueueSettings
from state_store.delta_log.lua_script import Argument, LuaScript

_LUA = Path(__file__).parent / "lua"
_SHARED = ("prelude", "fairness", "entries")


def _script(*parts: str) -> LuaScript:
    return LuaScript(*(_LUA / f"{part}.lua" for part in (*_SHARED, *parts)))


ENQUEUE = _script("enqueue")
POP = _script("rooms", "pop")
ACK = _script("ack")
DROP = _script("drop")
RETURN = _script("return")
CHARGE = _script("charge")
REMOVE = _script("remove")
CONTAINS = _script("contains")
REAP = _script("reap")
DEPTH = _script("depth")
LOAD = _script("load")


def pop_arguments(
    settings: QueueSettings, rooms: Sequence[SessionRoom], *, max_entries: int, pop_id: str
) -> Iterator[Argument]:
    """Everything pop.lua takes behind the time, in its order."""
    yield pop_id
    yield max_entries
    for duration in (settings.pop_hold, settings.skip_patience, settings.starving_after, settings.earmark_lease):
        yield duration_us(duration)
    yield from (settings.max_passed, settings.max_passed_of_tenant, settings.max_oversized)
    yield from (settings.rebase_counters_at, duration_us(RATE_WINDOW))
    yield from (duration_us(threshold) for threshold in settings.wait_thresholds)
    for room in rooms:
        yield room.session_id
        yield from room.max_entries
        yield from room.max_tokens
        yield from (room.capacity_tokens, room.max_charged)
