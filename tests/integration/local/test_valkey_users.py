"""The users that the local stack and docker-compose.yml make in Valkey: enough for their service, and no more."""

import re
import socket
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from redis.exceptions import NoPermissionError, ResponseError

from service_kit.errors import QuotaExceededError
from service_kit.ids import GatewayId, KeyId, TenantId, new_generation_id
from sluice.local.valkey import LocalValkey, _binary
from sluice.local.valkey_users import RULES
from state_store.delta_log.connection import connect_redis
from state_store.delta_log.port import SealItem
from state_store.delta_log.redis_log import RedisDeltaLog
from state_store.errors import LogUnavailableError
from state_store.quota.port import QuotaCharge, QuotaSettlement, QuotaSubject
from state_store.quota.redis_quota import RedisQuota
from state_store.tenants import QuotaLimits
from tests.support.delta_logs import SUCCEEDED, database_url

COMPOSE = Path(__file__).parents[3] / "docker-compose.yml"
QUOTA_DATABASE = 11
LUA_DIRECTORIES = {
    "gateway": ["state_store/quota/lua"],
    "scheduler": ["state_store/delta_log/lua", "scheduler/queue/lua", "state_store/quota/lua"],
}
KEY_BY_DIRECTORY = {
    "state_store/delta_log/lua": "log:{s0}:x",
    "scheduler/queue/lua": "{q:r:p}:entries",
    "state_store/quota/lua": "{quota:0}:marker",
}


@pytest.fixture
def admin(valkey_server: LocalValkey) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey_server.url) as client:
        yield client


@pytest.fixture
def as_gateway(valkey_server: LocalValkey) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey_server.url_of("gateway"), protocol=2) as client:
        yield client


@pytest.mark.parametrize(
    "command",
    [
        "FLUSHALL",
        "FLUSHDB",
        "CONFIG GET *",
        "CONFIG SET maxmemory 1",
        "KEYS *",
        "SCAN 0",
        "ACL LIST",
        "SHUTDOWN NOSAVE",
        "MONITOR",
        "CLIENT LIST",
        "SCRIPT FLUSH",
        "GET queue:marker",
        "SET queue:marker 1",
        "SMEMBERS queue:models",
        "DEL {q:r:p}:entries",
        "HGETALL {q:r:p}:entries",
        "EVAL return 1 {q:r:p}:entries",
        "DEL log:{s0}:x",
        "HSET log:{s0}:x attempt 9",
        "XADD log:{s0}:x:deltas * a b",
        "PUBLISH log:gw:another x",
        "PUBLISH scheduler:cancelled x",
        "SUBSCRIBE scheduler:cancelled",
        "SUBSCRIBE queue:news",
        "PSUBSCRIBE *",
        "GET anything",
    ],
)
def test_the_gateways_user_cannot_touch_the_queue_write_a_log_or_see_the_server(
    as_gateway: redis.Redis, command: str
) -> None:
    words = command.split()
    if words[0] == "EVAL":
        words = ["EVAL", "return 1", "1", words[-1]]
    with pytest.raises(NoPermissionError):
        as_gateway.execute_command(*words)


def test_a_script_gives_the_gateways_user_no_more_than_it_has(as_gateway: redis.Redis) -> None:
    for script in ("return redis.call('DEL', KEYS[1])", "return redis.call('GET', 'queue:marker')"):
        with pytest.raises(ResponseError, match="permission"):
            as_gateway.eval(script, 1, "log:{s0}:x")


@pytest.mark.parametrize("command", ["FLUSHALL", "CONFIG GET *", "KEYS *", "ACL LIST", "GET anything"])
def test_the_schedulers_user_cannot_rule_the_server(valkey_server: LocalValkey, command: str) -> None:
    with redis.Redis.from_url(valkey_server.url_of("scheduler")) as client, pytest.raises(NoPermissionError):
        client.execute_command(*command.split())


@pytest.mark.parametrize("user", ["default", "nobody"])
def test_nobody_comes_in_without_a_password_of_their_own(valkey_server: LocalValkey, user: str) -> None:
    address = valkey_server.url.rsplit("@")[-1]
    for credentials in ("", f"{user}:@", f"{user}:{valkey_server.url.split(':')[2].split('@')[0]}@"):
        with redis.Redis.from_url(f"redis://{credentials}{address}") as client, pytest.raises(redis.RedisError):
            client.get("log:{s0}:x")


async def test_the_gateways_user_reads_watches_and_hears_a_log_that_the_schedulers_user_writes(
    valkey_server: LocalValkey,
) -> None:
    gateway, scheduler = (connect_redis(valkey_server.url_of(user)) for user in ("gateway", "scheduler"))
    reader, writer = RedisDeltaLog(gateway), RedisDeltaLog(scheduler)
    generation_id, gateway_id = new_generation_id(), GatewayId("g1")
    try:
        pushes = aiter(reader.subscribe(gateway_id))
        assert await anext(pushes) is None
        await reader.attach_many(gateway_id, [(generation_id, 0)])
        await reader.watch_many(gateway_id, [generation_id])
        assert await writer.last_watched_many([generation_id]) != [None]
        await writer.seal_many([SealItem(generation_id=generation_id, attempt=1, terminal=SUCCEEDED)])
        pushed = await anext(pushes)
        assert pushed is not None
        assert [push.generation_id for push in pushed] == [generation_id]
        await reader.read_many([(generation_id, 0)])
        await reader.unwatch_many(gateway_id, [generation_id])
        assert await writer.kept_since() <= datetime.now(UTC)
        with pytest.raises((LogUnavailableError, ResponseError)):
            await reader.seal_many([SealItem(generation_id=generation_id, attempt=2, terminal=SUCCEEDED)])
    finally:
        await gateway.aclose()
        await scheduler.aclose()


async def test_the_gateways_user_reserves_and_the_schedulers_user_settles_quotas(
    valkey_server: LocalValkey,
) -> None:
    own = {user: database_url(valkey_server.url_of(user), QUOTA_DATABASE) for user in ("admin", "gateway", "scheduler")}
    clients = [connect_redis(own[user]) for user in ("gateway", "scheduler")]
    gateway, scheduler = (RedisQuota(client) for client in clients)
    limits = QuotaLimits(max_concurrent=1)
    subject = QuotaSubject(
        tenant_id=TenantId("t"), key_id=KeyId("k"), tenant_limits=limits, key_limits=QuotaLimits(tokens_per_minute=100)
    )
    charge = QuotaCharge(
        generation_id=new_generation_id(),
        tenant_id=subject.tenant_id,
        key_id=subject.key_id,
        prompt_tokens=1,
        max_output_tokens=2,
    )
    settlement = QuotaSettlement(
        generation_id=charge.generation_id, tenant_id=charge.tenant_id, key_id=charge.key_id, used_tokens=2
    )
    with redis.Redis.from_url(own["admin"]) as admin:
        admin.flushdb()
    try:
        assert await scheduler.begin_rebuild()
        await scheduler.mark_ready()
        assert {standing.remaining for standing in await gateway.reserve(charge, subject)} == {0, 97}
        with pytest.raises(QuotaExceededError):
            await gateway.look(subject)
        await scheduler.bind_many([charge])
        await scheduler.due_many(limit=10)
        await scheduler.settle_many([settlement])
        assert {standing.remaining for standing in await gateway.look(subject)} == {1, 98}
        await gateway.release_many([charge])
    finally:
        for client in clients:
            await client.aclose()


@pytest.mark.parametrize(
    ("user", "directory"), [(user, directory) for user, paths in LUA_DIRECTORIES.items() for directory in paths]
)
def test_every_command_in_the_scripts_is_one_that_their_user_may_run(
    admin: redis.Redis, user: str, directory: str
) -> None:
    sources = "\n".join(path.read_text() for path in sorted((COMPOSE.parent / directory).glob("*.lua")))
    commands = set(re.findall(r"(?:redis\.)?call\(\s*['\"]([A-Z]+)['\"]", sources)) - {"PUBLISH", "TIME"}
    assert commands
    arguments = {"SET": ["1"], "ZADD": ["1", "m"], "XADD": ["*", "a", "b"]}
    for command in sorted(commands):
        key = KEY_BY_DIRECTORY[directory]
        words = [command, key, *arguments.get(command, ["1", "2", "3"])]
        answer: Any = admin.execute_command("ACL", "DRYRUN", user, *_shortened(admin, words))
        assert answer in (b"OK", "OK"), (command, answer)


def _shortened(admin: redis.Redis, words: list[str]) -> list[str]:
    """With as many words as the command takes."""
    (about,) = admin.execute_command("COMMAND", "INFO", words[0]).values()
    arity = about["arity"]
    return words[: abs(arity)] if arity > 0 else words[: max(2, abs(arity))]


def test_the_compose_file_makes_the_same_users_with_passwords_from_the_environment(
    admin: redis.Redis, tmp_path: Path
) -> None:
    compose = yaml.safe_load(COMPOSE.read_text())
    command = [_substituted(word) for word in compose["services"]["valkey"]["command"]]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [word.replace("/data", str(tmp_path)) for word in command[1:]]
    server = subprocess.Popen(
        [str(_binary()), *arguments, "--port", str(port), "--bind", "127.0.0.1"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        assert any("Ready to accept connections" in line for line in server.stdout)
        rules = {user: _rules(_list_users(port), user) for user in RULES}
        assert rules == {user: _rules(admin.acl_list(), user) for user in RULES}
        stores = {
            name: _substituted(compose["services"][name]["environment"]["SLUICE_REDIS_URL"])
            for name in ("gateway", "scheduler")
        }
        for name, url in stores.items():
            local = url.replace("valkey:6379", f"127.0.0.1:{port}")
            with redis.Redis.from_url(local) as client:
                assert client.ping()
            assert local.startswith(f"redis://{name}:")
    finally:
        server.terminate()
        server.communicate()


def _list_users(port: int) -> Any:
    with redis.Redis.from_url(f"redis://admin:sluice-admin@127.0.0.1:{port}/0") as client:
        return client.acl_list()


def _rules(lines: list[Any], user: str) -> set[str]:
    """What a user may do, without its password."""
    texts = [line.decode() if isinstance(line, bytes) else line for line in lines]
    (line,) = [text for text in texts if text.split()[1] == user]
    return {word for word in re.findall(r"\([^)]*\)|\S+", line) if not word.startswith("#")}


def _substituted(text: str) -> str:
    """`${NAME:-default}` by its default, as compose does where nothing is set."""
    return re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", text)
