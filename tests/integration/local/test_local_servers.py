import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis

from sluice.local.child import LocalServerError
from sluice.local.postgres import LocalPostgres
from sluice.local.postgres_binaries import _reachable_copy, postgres_binary
from sluice.local.valkey import LocalValkey


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _wait_gone(pid: int, timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while _is_alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def postgres(server_directory: Path, request: pytest.FixtureRequest) -> Iterator[LocalPostgres]:
    server = LocalPostgres(server_directory / request.node.name, fsync=False)
    yield server
    server.stop()


def test_committed_rows_survive_a_killed_postmaster_at_the_same_address(postgres: LocalPostgres) -> None:
    postgres.start()
    dsn = postgres.create_database("kept")
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE fact (value int)")
        connection.execute("INSERT INTO fact VALUES (7)")
    postgres.kill()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(dsn).close()
    postgres.start()
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT value FROM fact").fetchone() == (7,)


def test_a_second_server_object_finds_cluster_password_and_port_of_the_first(postgres: LocalPostgres) -> None:
    postgres.start()
    dsn = postgres.create_database("kept")
    postgres.stop()
    with LocalPostgres(postgres._directory, fsync=False) as second:
        assert second.dsn_of("kept") == dsn
        assert second.has_database("kept")
        assert not second.has_database("absent")


def test_a_lock_file_whose_pid_belongs_to_a_stranger_does_not_stop_the_start(postgres: LocalPostgres) -> None:
    postgres.start()
    dsn = postgres.dsn
    with psycopg.connect(dsn) as connection:
        data = Path(str(connection.execute("SHOW data_directory").fetchone()[0]))
    postgres.stop()
    stranger = subprocess.Popen(
        ["sleep", "60"], user=data.stat().st_uid, group=data.stat().st_gid, extra_groups=[], cwd="/"
    )
    try:
        (data / "postmaster.pid").write_text(f"{stranger.pid}\n{data}\n1\n5432\n\n127.0.0.1\n\n")
        postgres.start()
        psycopg.connect(postgres.dsn).close()
    finally:
        stranger.kill()
        stranger.wait()


def test_a_cluster_in_use_is_refused_with_the_pid_of_its_user(postgres: LocalPostgres) -> None:
    postgres.start()
    ticks = iter(range(0, 100_000, 10))
    second = LocalPostgres(postgres._directory, fsync=False, clock=lambda: float(next(ticks)))
    with pytest.raises(LocalServerError, match=f"pid {postgres.pid}"):
        second.start()
    psycopg.connect(postgres.dsn).close()


def test_a_database_from_a_template_has_its_tables(postgres_server: LocalPostgres) -> None:
    template = postgres_server.create_database("template_of_test")
    with psycopg.connect(template) as connection:
        connection.execute("CREATE TABLE fact (value int)")
    copy = postgres_server.create_database("copy_of_test", template="template_of_test")
    with psycopg.connect(copy) as connection:
        assert connection.execute("SELECT count(*) FROM fact").fetchone() == (0,)


def test_postgres_refuses_a_wrong_password(postgres_server: LocalPostgres) -> None:
    port = postgres_server.dsn.rsplit(":", 1)[1]
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(f"postgresql://sluice:wrong@127.0.0.1:{port}").close()


def test_valkey_keeps_acknowledged_writes_over_a_kill_and_asks_for_its_password(tmp_path: Path) -> None:
    with LocalValkey(tmp_path) as server:
        client = redis.Redis.from_url(server.url)
        client.set("fact", "7")
        client.close()
        url = server.url
        server.kill()
        server.start()
        assert server.url == url
        client = redis.Redis.from_url(url)
        assert client.get("fact") == b"7"
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        client.close()
        stranger = redis.Redis.from_url("redis://" + url.split("@")[1])
        with pytest.raises(redis.AuthenticationError):
            stranger.ping()
        stranger.close()


_OWNER = """
import sys
from pathlib import Path
from sluice.local.postgres import LocalPostgres
from sluice.local.valkey import LocalValkey

postgres, valkey = LocalPostgres(Path(sys.argv[1]), fsync=False), LocalValkey(Path(sys.argv[2]))
postgres.start()
valkey.start()
print(postgres.pid, valkey.pid, flush=True)
sys.stdin.read()
"""


def test_the_servers_die_with_a_killed_owner_and_start_again(server_directory: Path, tmp_path: Path) -> None:
    directory = server_directory / "orphaned"
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(directory), str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert all(_is_alive(pid) for pid in pids)
        owner.send_signal(signal.SIGKILL)
    assert len(pids) == 2
    assert all(_wait_gone(pid) for pid in pids)
    with LocalPostgres(directory, fsync=False) as again:
        psycopg.connect(again.dsn).close()


def test_stop_twice_and_stop_before_start_do_nothing(tmp_path: Path) -> None:
    server = LocalValkey(tmp_path)
    server.stop()
    server.start()
    server.stop()
    server.stop()
    assert not server.is_running


@pytest.mark.skipif(os.geteuid() != 0, reason="only root hands the cluster to another user")
def test_a_directory_that_postgres_own_user_cannot_reach_gets_its_cluster_elsewhere(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    with LocalPostgres(private / "postgres", fsync=False) as server:
        location = Path((private / "postgres" / "data-location").read_text().strip())
        try:
            server.create_database("kept")
            server.stop()
            assert (location / "data" / "PG_VERSION").exists()
            with LocalPostgres(private / "postgres", fsync=False) as second:
                assert second.has_database("kept")
        finally:
            shutil.rmtree(location)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs Postgres as another user")
def test_programs_that_postgres_own_user_cannot_reach_are_copied_once_to_a_place_that_it_can(tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    copies.mkdir()
    installation = postgres_binary("postgres").parents[1]
    first = _reachable_copy(installation, copies)
    (first / "made-before").touch()
    assert _reachable_copy(installation, copies) == first
    assert (first / "made-before").exists()
    assert len(list(copies.iterdir())) == 1
    version = subprocess.run([first / "bin" / "postgres", "--version"], capture_output=True, text=True, check=True)
    assert "(PostgreSQL) 18" in version.stdout
