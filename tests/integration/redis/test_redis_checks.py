"""A server that would lose data is refused at the start, however it has to be asked."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from sluice.local.valkey import LocalValkey
from state_store.delta_log.connection import connect_redis
from state_store.errors import LogUnavailableError
from state_store.redis_checks import RedisSafety, UnsafeRedisError, check_redis, read_safety, wait_for_safe_redis
from tests.integration.redis.conftest import IMPATIENT

LOSSES = {
    "appendonly is no": {"appendonly": "no"},
    "maxmemory-policy is allkeys-lru": {"maxmemory-policy": "allkeys-lru"},
}


@pytest.fixture
async def server(own_server: LocalValkey, own_client: Redis) -> Redis:
    """With its safe settings again."""
    await own_client.config_set("appendonly", "yes")
    await own_client.config_set("maxmemory-policy", "noeviction")
    await own_client.config_set("appendfsync", "everysec")
    return own_client


async def restricted(server: Redis, own_server: LocalValkey, *forbidden: str) -> Redis:
    """A client whose user may not say these commands."""
    await server.acl_setuser(
        "restricted",
        enabled=True,
        reset=True,
        passwords=["+p"],
        keys=["*"],
        categories=["+@all"],
        commands=list(forbidden),
    )
    address = own_server.url.rpartition("@")[2]
    return connect_redis(f"redis://restricted:p@{address}", IMPATIENT)


async def test_the_local_stacks_server_is_safe(server: Redis) -> None:
    assert await read_safety(server) == RedisSafety(
        appendonly="yes", appendfsync="everysec", maxmemory_policy="noeviction"
    )
    with capture_logs() as logs:
        await check_redis(server, allow_unsafe=False)
    assert logs == []


@pytest.mark.parametrize("problem", LOSSES)
@pytest.mark.parametrize("forbidden", [(), ("-config",)])
async def test_what_would_lose_data_is_refused_unless_it_is_allowed(
    server: Redis, own_server: LocalValkey, problem: str, forbidden: tuple[str, ...]
) -> None:
    for name, value in LOSSES[problem].items():
        await server.config_set(name, value)
    client = await restricted(server, own_server, *forbidden)
    with pytest.raises(UnsafeRedisError, match=problem) as refusal:
        await check_redis(client, allow_unsafe=False)
    assert "\n" not in str(refusal.value)
    with capture_logs() as logs:
        await check_redis(client, allow_unsafe=True)
    assert [entry["log_level"] for entry in logs if entry["event"] == "redis_is_unsafe"] == ["warning"]
    await client.aclose()


async def test_doubts_are_told_and_refuse_nothing(server: Redis, own_server: LocalValkey) -> None:
    await server.config_set("appendfsync", "no")
    silent = await restricted(server, own_server, "-config", "-info")
    with capture_logs() as logs:
        await check_redis(server, allow_unsafe=False)
        await check_redis(silent, allow_unsafe=False)
    problems = [entry["problem"].split(" (")[0] for entry in logs if entry["event"] == "redis_may_lose_writes"]
    assert problems == ["appendfsync is no", "appendonly cannot be asked", "maxmemory-policy cannot be asked"]
    await silent.aclose()


@pytest.mark.parametrize("user", ["gateway", "scheduler"])
async def test_each_services_own_user_may_ask(valkey_server: LocalValkey, user: str) -> None:
    client = connect_redis(valkey_server.url_of(user))
    assert await read_safety(client) == RedisSafety(appendonly="yes", maxmemory_policy="noeviction")
    await client.aclose()


async def test_a_server_that_is_away_is_waited_for(server: Redis, own_server: LocalValkey) -> None:
    own_server.kill()
    with pytest.raises(LogUnavailableError):
        await check_redis(server, allow_unsafe=False)
    asked = 0

    class Reviving:
        """Comes back while it is asked for the second time."""

        async def config_get(self, name: str) -> dict[str, str]:
            nonlocal asked
            asked += 1
            if asked == 2:
                own_server.start()
            return await server.config_get(name)

    await wait_for_safe_redis(Reviving(), allow_unsafe=False, poll_s=0)  # type: ignore[arg-type]
    assert asked > 2


@pytest.mark.parametrize("service", ["scheduler", "gateway"])
async def test_a_service_refuses_to_start_with_one_line(
    server: Redis, own_server: LocalValkey, make_store_dsn: Callable[[], str], tmp_path: str, service: str
) -> None:
    await server.config_set("maxmemory-policy", "allkeys-random")
    environment = {
        "SLUICE_POSTGRES_DSN": make_store_dsn(),
        "SLUICE_REDIS_URL": own_server.url,
        "SLUICE_SCHEDULER_LISTEN": "127.0.0.1:0",
        "SLUICE_GATEWAY_LISTEN": "127.0.0.1:0",
        "SLUICE_SCHEDULERS": "127.0.0.1:1",
        "SLUICE_INTERNAL_TOKEN": "a-secret-of-the-test",
        "SLUICE_MODELS_DIR": str(tmp_path),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        service,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    line = said.decode().splitlines()[-1]
    assert line == (
        f"{service}: Redis would lose data: maxmemory-policy is allkeys-random (queues and logs are evicted): set it to"
        " noeviction (or accept it with SLUICE_ALLOW_UNSAFE_REDIS=true)"
    )
