"""What the admission queue's keys hold, read in one piece, and what they should hold for given live requests."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from scheduler.queue.codec import pack_entry, tenant_name, to_us
from scheduler.queue.port import QueueEntry

GLOBAL_KEYS = {"queue:marker", "queue:models"}
Contents = dict[str, dict[str, Any]]
"""By key without its hash tag: member or field -> score or value."""

_READ_ALL = """
local all = {}
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
  local kind, content = redis.call('TYPE', key).ok, {}
  if kind == 'zset' then
    content = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  elseif kind == 'hash' then
    content = redis.call('HGETALL', key)
  end
  all[#all + 1] = {key, content}
end
return all
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A request that the queue holds. In flight with `pop_id` and `held_until_us`, else queued."""

    entry: QueueEntry
    pop_id: str | None = None
    held_until_us: int = 0
    is_delayed: bool = False


async def read_contents(client: Redis, pattern: str = "*") -> Contents:
    """Everything in the database, which holds one model's queue, but the global keys; `pattern` says of which keys."""
    contents: Contents = {}
    for key, flat in await client.eval(_READ_ALL, 0, pattern):  # type: ignore[misc]
        name = key.decode()
        if name not in GLOBAL_KEYS:
            pairs = zip(flat[::2], flat[1::2], strict=True)
            contents[name.rpartition("}:")[2]] = {member.decode(): _value(value) for member, value in pairs}
    return contents


def contents_of(live: Iterable[Live]) -> Contents:
    """What follows from the requests alone: everything but counters, skips, earmarks and the meta hash. A lane's tenants
    have their counter as score, which does not follow from the requests: None."""
    contents: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for each in live:
        entry, generation = each.entry, str(each.entry.generation_id)
        rank, tenant = entry.priority_class.rank, tenant_name(entry.tenant_id)
        contents["entries"][generation] = pack_entry(entry)
        if each.pop_id is not None:
            contents["pops"][generation] = each.pop_id.encode()
            contents["in_flight"][generation] = each.held_until_us
            _add(contents["tenant_in_flight"], tenant, 1)
            continue
        _add(contents["counts"], f"r{rank}", 1)
        _add(contents["counts"], f"p{rank}", entry.prompt_tokens)
        _add(contents["tenant_requests"], tenant, 1)
        _add(contents["tenant_tokens"], tenant, entry.prompt_tokens)
        if entry.deadline_at is not None:
            contents["deadlines"][generation] = to_us(entry.deadline_at)
        if each.is_delayed:
            assert entry.ready_at is not None
            contents["delayed"][generation] = to_us(entry.ready_at)
            continue
        lane = rank * 2 + entry.is_charged
        contents[f"waiting:{lane}:{tenant}"][generation] = to_us(entry.order_at)
        contents[f"arrivals:{lane}"][generation] = to_us(entry.arrived_at)
        contents[f"tenants:{lane}"][tenant] = None
    return {key: members for key, members in contents.items() if members}


def without_history(contents: Contents) -> Contents:
    """What of the server's contents should follow from the live requests alone, comparable with `contents_of`."""
    history = ("marker", "meta", "counters", "idle_counters", "skipped", "earmarks", "earmarked", "earmark_leases")
    return {
        key: dict.fromkeys(members) if key.startswith("tenants:") else members
        for key, members in contents.items()
        if key not in history
    }


def _add(numbers: dict[str, Any], field: str, number: int) -> None:
    if number:
        numbers[field] = numbers.get(field, 0) + number


def _value(value: bytes) -> int | bytes:
    """A number where it is one; packed entries and ids are not."""
    try:
        return int(value)
    except ValueError:
        return value


def active_tenants(live: Iterable[Live]) -> set[str]:
    return {tenant_name(each.entry.tenant_id) for each in live}


def counters_of(contents: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Every tenant's counter; asserts that none has two and that lanes agree with it."""
    active, idle = contents.get("counters", {}), contents.get("idle_counters", {})
    assert not active.keys() & idle.keys()
    for key, members in contents.items():
        if key.startswith("tenants:"):
            assert members == {tenant: active[tenant] for tenant in members}
    return {**active, **idle}
