"""Redis itself, for tests that also run on it: the server of the operating system, where there is one."""

import os
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

BINARY_VARIABLE = "SLUICE_TEST_REDIS_SERVER"
_START_TIMEOUT_S = 20.0
_POLL_S = 0.02


def redis_server_binary() -> Path | None:
    """The server that the environment names, or the one on PATH. Some packages install Valkey under this name: told apart
    by what it says of itself."""
    named = os.environ.get(BINARY_VARIABLE)
    found = named or shutil.which("redis-server")
    if found is None:
        return None
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True, timeout=20).stdout
    return Path(found) if "Redis server" in version or named else None


class RedisServer:
    """One server on a free port of 127.0.0.1, without persistence; a context manager."""

    def __init__(self, binary: Path, directory: Path) -> None:
        self._binary = binary
        self._directory = directory
        self._password = secrets.token_hex(8)
        self._port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://:{self._password}@127.0.0.1:{self._port}/0"

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True)
        options = {"bind": "127.0.0.1", "port": self._port, "requirepass": self._password, "dir": self._directory}
        arguments = [value for key, text in options.items() for value in (f"--{key}", str(text))]
        with (self._directory / "redis.log").open("wb") as log:
            self._process = subprocess.Popen(
                [self._binary, *arguments, "--save", "", "--appendonly", "no"], stdout=log, stderr=subprocess.STDOUT
            )
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"redis-server does not start; see {self._directory / 'redis.log'}")
            time.sleep(_POLL_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        client = redis.Redis.from_url(self.url, socket_connect_timeout=1, socket_timeout=1)
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
        finally:
            client.close()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
