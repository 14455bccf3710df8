"""A child process that is ours: it is stopped in its own way, killed whole, and dies with us.

Children live in their own session, so Ctrl-C in a terminal reaches only the parent, which then stops them in order. Should
the parent be killed, the kernel sends each child its stop signal (Linux; elsewhere they survive a killed parent). The
kernel watches the thread that started the child: start children from a thread that lives as long as the process.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sluice.errors import UserError

_LAUNCHER = str(Path(__file__).with_name("die_with_parent.py"))


class LocalServerError(UserError):
    """A local server or service that cannot run; the text is one line that says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The user as whom a child runs."""

    user_id: int
    group_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What to run and how to end it. `stop_timeout_s` is the time between the stop signal and SIGKILL."""

    name: str
    command: tuple[str, ...]
    log_path: Path
    environment: Mapping[str, str] | None = None
    account: Account | None = None
    working_directory: Path | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    stop_timeout_s: float = 15.0


class ChildProcess:
    """One run of a `ChildSpec`. Its output goes to the log file and, line by line, to `on_line`."""

    def __init__(self, spec: ChildSpec, *, on_line: Callable[[str], None] | None = None) -> None:
        self.spec = spec
        self._on_line = on_line
        self._process: subprocess.Popen[bytes] | None = None
        self._pump: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """None while it runs or was never started; negative for a signal."""
        return self._process.poll() if self._process is not None else None

    def start(self) -> None:
        """Start it; does nothing when it runs already. Raises LocalServerError when it cannot be started at all."""
        if self.is_running:
            return
        self._reap()
        spec = self.spec
        account = ("-", "-") if spec.account is None else (str(spec.account.user_id), str(spec.account.group_id))
        launcher = (sys.executable, "-I", "-S", _LAUNCHER, str(int(spec.stop_signal)), str(os.getpid()), *account)
        try:
            with spec.log_path.open("ab") as log:
                self._process = subprocess.Popen(  # noqa: S603
                    (*launcher, *spec.command),
                    stdin=subprocess.DEVNULL,
                    stdout=log if self._on_line is None else subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=dict(spec.environment) if spec.environment is not None else None,
                    cwd=spec.working_directory,
                    start_new_session=True,
                )
        except OSError as error:
            raise LocalServerError(f"{spec.name} cannot be started: {error}") from error
        if self._process.stdout is not None:
            self._pump = threading.Thread(target=self._copy_output, args=(self._process.stdout,), daemon=True)
            self._pump.start()

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended within `timeout_s`."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def send_signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def stop(self) -> None:
        """The stop signal, then SIGKILL after `stop_timeout_s`; leaves nothing of its process group. Idempotent."""
        self.send_signal(self.spec.stop_signal)
        if not self.wait(self.spec.stop_timeout_s):
            self.send_signal(signal.SIGKILL)
        self._reap()

    def kill(self) -> None:
        """SIGKILL for the process alone, as a crash would: its own children must notice by themselves."""
        self.send_signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def log_tail(self, lines: int = 8) -> str:
        """The last lines of its log, for an error message."""
        try:
            return " | ".join(self.spec.log_path.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""

    def _reap(self) -> None:
        if self._process is None:
            return
        self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing of the group is left
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._pump is not None:
            self._pump.join()
            self._pump = None

    def _copy_output(self, output: IO[bytes]) -> None:
        assert self._on_line is not None
        with output, self.spec.log_path.open("ab") as log:
            for line in output:
                log.write(line)
                log.flush()
                self._on_line(line.decode(errors="replace").rstrip("\n"))


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_port_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
