"""The whole service on one machine: real Postgres and Valkey, and each service as an OS process of its own."""

import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from service_kit.environment import Environment, EnvironmentVariableError
from service_kit.health_probe import probe_tls
from service_kit.tls import ClientTls
from sluice.errors import UserError
from sluice.home import Home
from sluice.local.child import ChildProcess, ChildSpec, LocalServerError
from sluice.local.health import Health, check_health
from sluice.local.postgres import LocalPostgres
from sluice.local.restarts import RestartClock
from sluice.local.server_state import write_private
from sluice.local.services import Service, ServiceContext, ServiceInstance, plan_instances, service_spec
from sluice.local.valkey import LocalValkey
from sluice.run_file import encode_tls

DATABASE = "sluice"
_POLL_S = 0.1
_MAX_DEATHS_AT_START = 3

OnLine = Callable[[str, str], None]
"""Hears (name of the process, line of its output)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSettings:
    """What to run. `counts` are the processes of each service, 1 where unnamed, workers per model; `gateway_port` None
    takes a free one."""

    home: Home
    models_directory: Path
    models: tuple[str, ...]
    engine: str
    gateway_port: int | None = None
    counts: Mapping[Service, int] = field(default_factory=dict)
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for every service."""
    fsync: bool = True


class LocalStack:
    """Owns the processes. Start, supervise and stop it from one thread that lives as long as the process.

    Addresses are chosen once and kept over restarts. `stop` leaves no process; should this process be killed, the kernel
    ends its children.
    """

    def __init__(
        self, settings: StackSettings, *, on_line: OnLine, clock: Callable[[], float] = time.monotonic
    ) -> None:
        home = settings.home
        self._settings = settings
        self._on_line = on_line
        self._clock = clock
        self.postgres = LocalPostgres(home.postgres, fsync=settings.fsync)
        self.valkey = LocalValkey(home.valkey, fsync=settings.fsync)
        self.instances: list[ServiceInstance] = []
        self.services: dict[str, ChildProcess] = {}
        self._clocks: dict[str, RestartClock] = {}
        self._lock: IO[str] | None = None
        self._probes: dict[str, ClientTls | None] = {}

    @property
    def models(self) -> tuple[str, ...]:
        return self._settings.models

    @property
    def model(self) -> str:
        """The first one."""
        return self._settings.models[0]

    @property
    def dsn(self) -> str:
        return self.postgres.dsn_of(DATABASE)

    @property
    def gateways(self) -> list[str]:
        """Addresses (host:port)."""
        return [instance.address for instance in self.instances if instance.service is Service.GATEWAY]

    def start_servers(self) -> None:
        """Postgres with its database, and Valkey. Raises UserError when another stack uses this home, LocalServerError."""
        self._settings.home.create()
        self._take_lock()
        self.postgres.start()
        if not self.postgres.has_database(DATABASE):
            self.postgres.create_database(DATABASE)
        self.valkey.start()

    def start_services(self) -> None:
        """All service processes, without waiting; the schema must be there. Raises UserError."""
        home = self._settings.home
        for directory in (home.logs, home.traces):
            directory.mkdir(parents=True, exist_ok=True)
        for old in home.traces.glob("*.jsonl"):
            old.unlink()
        self.instances = self._choose_addresses()
        context = ServiceContext(
            postgres_dsn=self.dsn,
            redis_urls={service: self.valkey.url_of(service.value) for service in (Service.SCHEDULER, Service.GATEWAY)},
            models_directory=self._settings.models_directory,
            engine=self._settings.engine,
            trace_directory=home.traces,
            log_directory=home.logs,
            internal_token=secrets.token_urlsafe(24),
            base_environment=dict(os.environ),
            overrides=self._settings.overrides,
        )
        for instance in self.instances:
            spec = service_spec(instance, self.instances, context)
            self._probes[instance.name] = _probe_of(instance, spec)
            spec.log_path.unlink(missing_ok=True)  # one run, one log
            self.services[instance.name] = ChildProcess(spec, on_line=self._prefixed(instance.name))
            self.start_service(instance.name)
        self._write_run_file()

    def start_service(self, name: str) -> None:
        self.services[name].start()
        self._clocks.setdefault(name, RestartClock()).started(self._clock())

    def health(self) -> dict[str, Health]:
        """What each service says of itself."""
        return {
            instance.name: check_health(instance.address, tls=self.probe_of(instance.name))
            for instance in self.instances
        }

    def probe_of(self, name: str) -> ClientTls | None:
        """How to talk to a started service; None: plainly."""
        return self._probes[name]

    def wait_serving(self, *, timeout_s: float, has_to_stop: Callable[[], bool] = lambda: False) -> bool:
        """Until every service says that it serves; False when `has_to_stop` first. Children that die are restarted.

        Raises LocalServerError after `timeout_s` with the service that is not ready and the end of its log.
        """
        deadline = self._clock() + timeout_s
        reported: set[str] = set()
        while not has_to_stop():
            health = self.health()
            waiting = [name for name in health if health[name] is not Health.SERVING]
            for name in sorted(set(health) - set(waiting) - reported):
                self._on_line("sluice", f"{name} serves")
            reported |= set(health) - set(waiting)
            if not waiting:
                return True
            hopeless = next(
                (name for name, clock in self._clocks.items() if clock.deaths >= _MAX_DEATHS_AT_START), None
            )
            if hopeless is not None:
                tail = self.services[hopeless].log_tail(3)
                raise LocalServerError(f"{hopeless} does not start; its log ends with: {tail}")
            if self._clock() > deadline:
                tail = self.services[waiting[0]].log_tail(3)
                raise LocalServerError(f"{waiting[0]} is not ready after {timeout_s:.0f} s; its log ends with: {tail}")
            self.supervise_once()
            time.sleep(_POLL_S)
        return False

    def supervise_once(self) -> None:
        """Notice children that died, report them, and start again those whose time has come."""
        now_s = self._clock()
        for server in (self.postgres, self.valkey):
            if not server.is_running:
                self._on_line("sluice", f"{type(server).__name__} died; starting it again")
                server.start()
        for name, child in self.services.items():
            clock = self._clocks[name]
            if child.is_running:
                continue
            if clock.due_s is None:
                delay_s = clock.died(now_s)
                how = _how_it_ended(child.exit_code)
                self._on_line("sluice", f"{name} {how}; starting it again in {delay_s:g} s")
            elif clock.is_due(now_s):
                self.start_service(name)
                self._write_run_file()

    def stop(self) -> None:
        """Gateways first, then workers, schedulers, Valkey, Postgres: nobody is left without what it needs. Idempotent."""
        with ExitStack() as actions:  # runs in reverse order, each one even if another fails
            actions.callback(self._release_lock)
            actions.callback(self.postgres.stop)
            actions.callback(self.valkey.stop)
            for name in self.services:
                actions.callback(self.services[name].stop)

    def kill(self) -> None:
        """SIGKILL for everything at once, as a power cut of the processes; `stop` afterwards tidies up."""
        for child in self.services.values():
            child.kill()
        self.valkey.kill()
        self.postgres.kill()

    def _prefixed(self, name: str) -> Callable[[str], None]:
        return lambda line: self._on_line(name, line)

    def _choose_addresses(self) -> list[ServiceInstance]:
        """Free ports, held all at once so that no two are the same."""
        instances: list[ServiceInstance] = []
        with ExitStack() as held:
            for planned in plan_instances(self._settings.counts, self._settings.models):
                wanted = self._settings.gateway_port if planned.name == Service.GATEWAY.value else None
                probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", wanted or 0))
                except OSError:
                    raise UserError(f"port {wanted} is in use; choose another one with --port") from None
                address = f"127.0.0.1:{probe.getsockname()[1]}"
                instances.append(
                    ServiceInstance(name=planned.name, service=planned.service, model=planned.model, address=address)
                )
        return instances

    def _take_lock(self) -> None:
        if self._lock is not None:
            return
        lock = self._settings.home.lock.open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            home = self._settings.home.root
            raise UserError(f"a sluice runs already in {home}; stop it, or use --data-dir for another one") from None
        self._lock = lock

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._settings.home.run_file.unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    def _write_run_file(self) -> None:
        run = {
            "pid": os.getpid(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "models": self._settings.models,
            "engine": self._settings.engine,
            "postgres": {"dsn": self.dsn, "pid": self.postgres.pid},
            "valkey": {"url": self.valkey.url, "pid": self.valkey.pid},
            "services": {
                instance.name: {
                    "service": instance.service.value,
                    "address": instance.address,
                    "pid": self.services[instance.name].pid,
                    "model": instance.model,
                    "tls": encode_tls(self.probe_of(instance.name)),
                }
                for instance in self.instances
                if instance.name in self.services
            },
        }
        write_private(self._settings.home.run_file, json.dumps(run, indent=2) + "\n")


def _probe_of(instance: ServiceInstance, spec: ChildSpec) -> ClientTls | None:
    """By the variables of the service itself. Raises UserError."""
    try:
        return probe_tls(Environment(spec.environment or {}), is_internal=instance.service is not Service.GATEWAY)
    except EnvironmentVariableError as error:
        raise UserError(str(error)) from error


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"was ended by signal {-exit_code}"
    return f"ended with code {exit_code}"
