"""`sluice tenants|keys|quotas|usage|audit` on a real database."""

import asyncio
import csv
import getpass
import io
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from service_kit.api_key import parse_api_key
from service_kit.errors import AlreadyExistsError, InvalidArgumentError, SluiceError
from service_kit.ids import KeyId, TenantId
from sluice.__main__ import build_app
from sluice.errors import UserError
from sluice.listing import Format, write_rows
from state_store.memory.store import MemoryStore
from state_store.postgres.store import PostgresStore
from state_store.tenants import ApiKey
from tests.support.gateway import running_gateway
from tests.support.generations import Store, end_of_queued, submitted
from tests.support.tenants import new_key

_NOW = datetime.now(UTC)
_COMMANDS = [
    ("tenants", ["create", "list", "show", "update", "disable", "enable"]),
    ("keys", ["create", "list", "rotate", "revoke", "update"]),
    ("quotas", ["show", "set", "clear"]),
    ("usage", [""]),
    ("audit", [""]),
]


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(build_app([arguments[0]]), list(arguments))


class Commands:
    """The command line on one database."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn

    def run(self, *arguments: str) -> Any:
        result = invoke(*arguments, "--dsn", self.dsn)
        if result.exception is not None:
            raise result.exception
        return result

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--format", "json").stdout)

    def find(self, text: str) -> ApiKey:
        presented = parse_api_key(text.strip())
        assert presented is not None
        return asyncio.run(self._find(presented.prefix))

    async def _find(self, prefix: str) -> ApiKey:
        store = PostgresStore(self.dsn)
        await store.open()
        try:
            key = await store.find_key(prefix)
            assert key is not None
            return key
        finally:
            await store.close()


@pytest.fixture(scope="module")
def commands(make_store_dsn: Callable[[], str]) -> Commands:
    """Each test has tenants of its own."""
    return Commands(make_store_dsn())


@pytest.mark.parametrize(("group", "names"), _COMMANDS, ids=[group for group, _ in _COMMANDS])
def test_every_command_explains_itself_with_examples(group: str, names: list[str]) -> None:
    for name in names:
        shown = invoke(group, *([name] if name else []), "--help").stdout
        assert "Examples:" in shown
        assert f"sluice {group} {name}".strip() in shown


def test_a_tenant_is_made_changed_disabled_and_listed(commands: Commands) -> None:
    made = commands.json("tenants", "create", "team-a", "--weight", "3", "--model", "tiny", "--model", "large")
    assert made == {
        "tenant": "team-a",
        "name": "team-a",
        "weight": 3.0,
        "max_class": "INTERACTIVE",
        "allowed_models": ["tiny", "large"],
        "requests_per_minute": None,
        "tokens_per_minute": None,
        "max_concurrent": None,
        "tokens_per_day": None,
        "tokens_per_month": None,
        "disabled_at": None,
    }
    changed = commands.json("tenants", "update", "team-a", "--name", "Team A", "--max-class", "batch", "--all-models")
    assert changed == {**made, "name": "Team A", "max_class": "BATCH", "allowed_models": None}
    assert commands.json("tenants", "disable", "team-a")["disabled_at"] is not None
    assert commands.json("tenants", "enable", "team-a") == changed == commands.json("tenants", "show", "team-a")
    assert changed in commands.json("tenants", "list")
    lines = commands.run("tenants", "list").stdout.splitlines()
    assert lines[0].split() == ["TENANT", "NAME", "WEIGHT", "MAX_CLASS", "ALLOWED_MODELS", "DISABLED_AT"]
    assert ["team-a", "Team", "A", "3", "BATCH", "all", "-"] in [line.split() for line in lines]
    shown = commands.run("tenants", "show", "team-a").stdout.splitlines()
    assert ["requests_per_minute", "unlimited"] in [line.split() for line in shown]


def test_a_key_is_printed_once_on_stdout_and_everything_else_on_stderr(commands: Commands) -> None:
    made = commands.run("keys", "create", "--tenant", "new-b", "--name", "ci", "--admin", "--expires-in", "90d")
    key = commands.find(made.stdout)
    assert made.stdout.count("\n") == 1
    assert made.stdout.strip() not in made.stderr
    assert key.key_id in made.stderr
    assert (key.tenant.tenant_id, key.name, key.is_admin) == ("new-b", "ci", True)
    assert key.expires_at is not None
    assert abs(key.expires_at - _NOW - timedelta(days=90)) < timedelta(hours=1)
    plain = commands.find(commands.run("keys", "create", "--tenant", "new-b").stdout)
    assert (plain.is_admin, plain.expires_at) == (False, None)
    listed = commands.json("keys", "list", "--tenant", "new-b")
    assert [it["key"] for it in listed] == [plain.key_id, key.key_id]
    printed = commands.run("keys", "list").stdout + json.dumps(listed) + commands.run("audit").stdout
    assert made.stdout.strip().rsplit("-", 1)[-1] not in printed


def test_a_key_is_rotated_with_overlap_updated_and_revoked_by_id_or_prefix(commands: Commands) -> None:
    old = commands.find(commands.run("keys", "create", "--tenant", "c", "--name", "ci").stdout)
    rotated = commands.run("keys", "rotate", old.prefix, "--overlap", "1h")
    new = commands.find(rotated.stdout)
    assert (new.name, new.tenant.tenant_id, new.expires_at) == ("ci", "c", None)
    assert old.key_id in rotated.stderr
    replaced = asyncio.run(commands._find(old.prefix))
    assert replaced.expires_at is not None
    assert replaced.expires_at <= datetime.now(UTC) + timedelta(hours=1)
    assert commands.json("keys", "update", new.key_id, "--name", "nightly")["name"] == "nightly"
    first = commands.json("keys", "revoke", new.prefix)
    assert first["revoked_at"] is not None
    assert commands.json("keys", "revoke", new.key_id) == first
    assert [it["key"] for it in commands.json("keys", "list", "--tenant", "c")] == [old.key_id]
    assert [it["key"] for it in commands.json("keys", "list", "--tenant", "c", "--all")] == [new.key_id, old.key_id]


def test_limits_are_set_one_by_one_and_cleared(commands: Commands) -> None:
    key = commands.find(commands.run("keys", "create", "--tenant", "d").stdout)
    of_tenant = ("--tenant", "d")
    commands.run("quotas", "set", *of_tenant, "--requests-per-minute", "60", "--tokens-per-day", "1000000")
    commands.run("quotas", "set", *of_tenant, "--tokens-per-day", "unlimited", "--max-concurrent", "4")
    limited = {"subject": "tenant:d", "requests_per_minute": 60, "tokens_per_minute": None, "max_concurrent": 4}
    limited |= {"tokens_per_day": None, "tokens_per_month": None}
    assert commands.json("quotas", "show", *of_tenant) == [limited]
    both = commands.json("quotas", "set", "--key", key.key_id, "--tokens-per-month", "7")
    assert both[1] == limited
    assert (both[0]["subject"], both[0]["tokens_per_month"]) == (f"key:{key.key_id}", 7)
    shown = commands.run("quotas", "show", "--key", key.prefix).stdout.splitlines()
    assert shown[2].split() == ["tenant:d", "60", "unlimited", "4", "unlimited", "unlimited"]
    [cleared] = commands.json("quotas", "clear", *of_tenant)
    assert set(cleared.values()) == {"tenant:d", None}
    assert commands.json("quotas", "clear", "--key", key.prefix)[0]["tokens_per_month"] is None


def test_changes_are_listed_with_the_operator_who_made_them(commands: Commands) -> None:
    commands.run("tenants", "create", "e")
    commands.run("tenants", "update", "e", "--weight", "2")
    entries = commands.json("audit", "--target", "e")
    assert [entry["action"] for entry in entries] == ["tenant.update", "tenant.create"]
    assert {entry["actor"] for entry in entries} == {f"operator:{getpass.getuser()}"}
    assert entries[0]["details"] == "weight: 1 -> 2"
    assert "weight: 1 -> 2" in commands.run("audit", "--target", "e").stdout
    assert "there may be more" in commands.run("audit", "--limit", "1").stderr
    assert "no changes" in commands.run("audit", "--target", "nobody").stderr


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["tenants", "create", "Upper"], UserError, "is not a tenant"),
        (["tenants", "create", "x", "--weight", "0"], InvalidArgumentError, "--weight: must be from 0.001 to 1000"),
        (["tenants", "create", "x", "--weight", "nan"], InvalidArgumentError, "--weight"),
        (["tenants", "create", "x", "--max-class", "first"], UserError, "--max-class 'first'"),
        (["tenants", "create", "x", "--name", "a" * 101], InvalidArgumentError, "--name"),
        (["tenants", "create", "x", "--model", "a", "--model", "a"], InvalidArgumentError, "--model"),
        (["tenants", "show", "nobody"], UserError, "there is no tenant nobody"),
        (["tenants", "update", "nobody", "--weight", "1"], SluiceError, "there is no tenant nobody"),
        (["tenants", "update", "nobody"], UserError, "name what to change"),
        (["tenants", "update", "x", "--model", "a", "--all-models"], UserError, "--all-models contradicts --model"),
        (["keys", "create", "--tenant", "x", "--expires-in", "soon"], UserError, "--expires-in 'soon'"),
        (["keys", "create", "--tenant", "x", "--expires-in", "0s"], InvalidArgumentError, "--expires-in"),
        (["keys", "revoke", "nothing"], SluiceError, "there is no key nothing"),
        (["keys", "revoke", "\udcff"], UserError, "'\\udcff' is neither id nor prefix"),
        (["audit", "--target", "\udcff"], UserError, "--target '\\udcff'"),
        (["keys", "rotate", "nothing", "--overlap", "91d"], InvalidArgumentError, "--overlap"),
        (["keys", "update", "nothing"], UserError, "name what to change"),
        (["quotas", "show"], UserError, "--tenant, or a key with --key"),
        (["quotas", "show", "--tenant", "x", "--key", "y"], UserError, "--tenant, or a key with --key"),
        (["quotas", "set", "--tenant", "local"], UserError, "name at least one limit"),
        (
            ["quotas", "set", "--tenant", "local", "--max-concurrent", "0"],
            UserError,
            "--max-concurrent 0: must be from",
        ),
        (["quotas", "set", "--tenant", "local", "--max-concurrent", "-1"], UserError, "--max-concurrent '-1'"),
        (["quotas", "set", "--tenant", "local", "--tokens-per-day", "1e3"], UserError, "--tokens-per-day '1e3'"),
        (["usage", "--since", "yesterday"], UserError, "--since 'yesterday'"),
        (["usage", "--until", "tomorrow"], UserError, "--until 'tomorrow'"),
        (["usage", "--since", "1d", "--until", "2d"], UserError, "--since must be before --until"),
        (["usage", "--group-by", "tenant,tenant"], UserError, "--group-by"),
        (["usage", "--group-by", "colour"], UserError, "--group-by"),
        (["usage", "--api-key", "k"], UserError, "give one of them"),
    ],
)
def test_what_cannot_be_done_is_told_in_a_line_that_names_the_option(
    commands: Commands, arguments: list[str], error: type[Exception], message: str
) -> None:
    if "local" in arguments:
        commands.run("keys", "create", "--tenant", "local")
    with pytest.raises(error) as refused:
        commands.run(*arguments)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_tenant_is_made_once(commands: Commands) -> None:
    commands.run("tenants", "create", "f")
    with pytest.raises(AlreadyExistsError):
        commands.run("tenants", "create", "f")


async def use(store: Store) -> None:
    for tenant, key, age in (("u1", "k1", 0), ("u1", "k2", 0), ("u2", "k3", 0), ("u1", "k1", 5)):
        record = await submitted(store, tenant_id=TenantId(tenant), key_id=KeyId(key))
        await store.finish_many([end_of_queued(record)], now=_NOW - timedelta(days=age, seconds=1))


async def _use_database(dsn: str) -> None:
    store = PostgresStore(dsn)
    await store.open()
    await use(store)
    await store.close()


def test_usage_is_summed_as_table_csv_and_json(make_store_dsn: Callable[[], str]) -> None:
    commands = Commands(make_store_dsn())
    asyncio.run(_use_database(commands.dsn))
    rows = commands.json("usage")
    assert rows[0] == {
        "tenant": "u1",
        "generations": 3,
        "prompt_tokens": 9,
        "cached_prompt_tokens": 0,
        "output_tokens": 0,
    }
    assert [row["tenant"] for row in rows] == ["u1", "u2"]
    recent = ("usage", "--since", "1d", "--group-by", "key,tenant", "--format", "csv")
    table = list(csv.reader(io.StringIO(commands.run(*recent, "--tenant", "u1").stdout)))
    assert table == [
        ["key", "tenant", "generations", "prompt_tokens", "cached_prompt_tokens", "output_tokens"],
        ["k1", "u1", "1", "3", "0", "0"],
        ["k2", "u1", "1", "3", "0", "0"],
    ]
    lines = commands.run("usage", "--group-by", "day,class,state,model").stdout.splitlines()
    assert lines[0].split()[:4] == ["DAY", "CLASS", "STATE", "MODEL"]
    days = [f"{_NOW - timedelta(days=age, seconds=1):%Y-%m-%d}" for age in (5, 0)]
    assert [line.split()[:4] for line in lines[1:]] == [[day, "STANDARD", "CANCELLED", "tiny"] for day in days]
    [everything] = commands.json("usage", "--group-by", "")
    assert everything["generations"] == 4


async def test_usage_asked_of_a_gateway_prints_what_the_database_prints(
    tmp_path: Path, make_store_dsn: Callable[[], str]
) -> None:
    dsn = make_store_dsn()
    await _use_database(dsn)
    async with running_gateway(tmp_path) as rig:
        store: MemoryStore = rig.scheduler.store
        await use(store)
        admin = await new_key(store, "admin", is_admin=True)
        over_rpc = ("--target", f"127.0.0.1:1,{rig.config.listen}", "--api-key", admin)
        for options in (["--group-by", "day,key"], ["--tenant", "u2", "--format", "csv"], ["--format", "json"]):
            asked = await asyncio.to_thread(invoke, "usage", *options, *over_rpc)
            read = await asyncio.to_thread(invoke, "usage", *options, "--dsn", dsn)
            assert (asked.exit_code, asked.stdout) == (0, read.stdout)
        refused = await asyncio.to_thread(invoke, "usage", "--target", rig.config.listen, "--api-key", rig.key)
        assert isinstance(refused.exception, SluiceError)
        assert refused.exception.reason == "ADMIN_KEY_REQUIRED"


def test_nothing_is_an_empty_list_a_header_or_a_word_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    for form, printed in ((Format.JSON, "[]\n"), (Format.CSV, "a,b\n"), (Format.TABLE, "")):
        write_rows(["a", "b"], [], form, empty="nothing")
        assert tuple(capsys.readouterr()) == (printed, "nothing\n")
