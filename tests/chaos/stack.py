"""The whole service as OS processes, with a link that can be cut between any two of them, kept over many trials."""

import asyncio
import dataclasses
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit, urlunsplit

from sluice.client import ClientSettings, SluiceClient
from sluice.home import Home
from sluice.keys import LOCAL_TENANT, create_key
from sluice.local.child import ChildProcess, ChildSpec, free_port
from sluice.local.health import Health, check_health
from sluice.local.postgres import LocalPostgres
from sluice.local.services import (
    PlannedInstance,
    Service,
    ServiceContext,
    ServiceInstance,
    plan_instances,
    service_spec,
)
from sluice.local.stack import DATABASE
from sluice.local.valkey import LocalValkey
from sluice.retry import RetryPolicy
from state_store.postgres.migrate import upgrade
from state_store.postgres.store import PostgresStore
from tests.chaos.append_only import AppendOnlyFile
from tests.chaos.database import install_witnesses
from tests.chaos.proxy import Link
from tests.support.processes import send_to_tree

ResultT = TypeVar("ResultT")

_COUNTS = {Service.SCHEDULER: 2, Service.GPU_WORKER: 2, Service.GATEWAY: 2}
_CALLERS = {
    Service.GATEWAY: ("client",),
    Service.SCHEDULER: ("gateways", "workers"),
    Service.GPU_WORKER: ("schedulers",),
}
"""Who connects to a service; each has a link of its own to every process of it."""
_SUPERVISE_S = 0.2
_RESTART_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosSettings:
    """`environment` is for every service."""

    home: Home
    models_directory: Path
    model: str
    engine: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    at_s: float
    process: str
    text: str


class ChaosStack:
    """Owner of all processes and links. What ends by itself is started again, and noted in `deaths`."""

    def __init__(self, settings: ChaosSettings) -> None:
        self.settings = settings
        self.postgres = LocalPostgres(settings.home.postgres, fsync=False)
        self.valkey = LocalValkey(settings.home.valkey, fsync=False)
        self.append_only = AppendOnlyFile(settings.home.valkey)
        self.instances: dict[str, ServiceInstance] = {}
        self.links: dict[str, Link] = {}
        self.lines: list[LogLine] = []
        self.deaths: list[LogLine] = []
        self._children: dict[str, ChildProcess] = {}
        self._held: set[str] = set()
        self._password = secrets.token_urlsafe(16)
        self._api_key = ""
        # The kernel ends children with the thread that started them: this one lives as long as the stack.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="processes")
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def dsn(self) -> str:
        return self.postgres.dsn_of(DATABASE)

    async def run(self, action: Callable[[], ResultT]) -> ResultT:
        """Runs what starts, stops or waits for processes, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, action)

    async def start(self) -> None:
        self.settings.home.create()
        self.settings.home.logs.mkdir(exist_ok=True)
        self.settings.home.traces.mkdir(exist_ok=True)
        await self.run(self._start_servers)
        self._api_key = await _create_key(self.dsn)
        for planned in self._plan():
            address = f"127.0.0.1:{free_port()}"
            self.instances[planned.name] = ServiceInstance(
                name=planned.name, service=planned.service, model=planned.model, address=address
            )
        await self._start_links()
        for instance in self.instances.values():
            self._children[instance.name] = ChildProcess(self._spec(instance), on_line=self._note(instance.name))
            await self.start_process(instance.name)
        self._tasks = [asyncio.create_task(self._supervise()), asyncio.create_task(self.append_only.watch())]
        await self.until_serving(180)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.run(self._kill_everything)
        for link in self.links.values():
            await link.stop()
        self._thread.shutdown()

    def client(self, number: int) -> SluiceClient:
        """Clients of different numbers begin at different gateways."""
        targets = [self.links[f"client->{name}"].address for name in self.names(Service.GATEWAY)]
        turn = number % len(targets)
        retry = RetryPolicy(max_delay=RetryPolicy().first_delay * 10, give_up_after=RetryPolicy().give_up_after / 2)
        settings = ClientSettings(targets=(*targets[turn:], *targets[:turn]), api_key=self._api_key, retry=retry)
        return SluiceClient(settings)

    def names(self, service: Service) -> list[str]:
        return [name for name, instance in self.instances.items() if instance.service is service]

    def find_links(self, prefix: str) -> list[Link]:
        return [link for name, link in self.links.items() if name.startswith(prefix)]

    def worker_at(self, advertised: str) -> str:
        """Name of the worker process that schedulers reach at this address."""
        return next(n for n in self.names(Service.GPU_WORKER) if self.links[f"schedulers->{n}"].address == advertised)

    # -- processes

    async def start_process(self, name: str) -> None:
        await self.run(self._children[name].start)
        self._held.discard(name)

    async def kill(self, name: str) -> None:
        """SIGKILL; it stays away until `start_process`."""
        self._held.add(name)
        await self.run(self._children[name].kill)

    async def terminate(self, name: str) -> None:
        """SIGTERM, and waits for the end."""
        self._held.add(name)
        self.send_signal(name, signal.SIGTERM)
        await self.run(self._children[name].stop)

    def send_signal(self, name: str, number: signal.Signals, *, is_group: bool = False) -> None:
        child = self._children[name]
        if is_group and child.pid is not None and child.is_running:
            os.killpg(child.pid, number)
        else:
            child.send_signal(number)

    def signal_postgres(self, number: signal.Signals) -> None:
        """To all its processes."""
        if self.postgres.pid is not None and self.postgres.is_running:
            send_to_tree(self.postgres.pid, number)

    async def kill_all(self) -> None:
        """As a power cut of the processes."""
        self._held.update(self._children)
        for child in self._children.values():
            child.send_signal(signal.SIGKILL)
        kills = [self.valkey.kill, self.postgres.kill, *(child.kill for child in self._children.values())]
        await self.run(lambda: [kill() for kill in kills])

    async def heal(self) -> None:
        """Nothing is held up, paused or away."""
        for link in self.links.values():
            link.release()
        self.signal_postgres(signal.SIGCONT)
        await self.run(self.postgres.start)
        await self.run(self.valkey.start)
        for name, child in self._children.items():
            self.send_signal(name, signal.SIGCONT, is_group=True)
            if not child.is_running:
                await self.start_process(name)

    async def until_serving(self, timeout_s: float) -> None:
        """Every process says that it serves. Raises TimeoutError."""
        waiting = set(self.instances)
        async with asyncio.timeout(timeout_s):
            while waiting:
                for name in sorted(waiting):
                    health = await asyncio.to_thread(check_health, self.instances[name].address)
                    if health is Health.SERVING:
                        waiting.discard(name)
                await asyncio.sleep(0.05)

    async def _supervise(self) -> None:
        while True:
            await asyncio.sleep(_SUPERVISE_S)
            for name, child in self._children.items():
                if name not in self._held and not child.is_running:
                    text = f"ended by itself with {child.exit_code}: {child.log_tail(2)}"
                    self.deaths.append(LogLine(at_s=time.monotonic(), process=name, text=text))
                    await asyncio.sleep(_RESTART_S)
                    if name not in self._held:
                        await self.start_process(name)

    def _note(self, name: str) -> Callable[[str], None]:
        return lambda line: self.lines.append(LogLine(at_s=time.monotonic(), process=name, text=line))

    def _kill_everything(self) -> None:
        """Nobody needs what an orderly stop would write."""
        self._held.update(self._children)
        for child in self._children.values():
            child.kill()
            child.stop()
        self.valkey.kill()
        self.signal_postgres(signal.SIGCONT)
        self.postgres.kill()

    # -- wiring

    def _start_servers(self) -> None:
        self.postgres.start()
        self.postgres.create_database(DATABASE)
        self.valkey.start()
        upgrade(self.dsn)
        users = {each.name: self._password for each in self._plan() if each.service is Service.SCHEDULER}
        install_witnesses(self.dsn, users)

    def _plan(self) -> list[PlannedInstance]:
        return plan_instances(_COUNTS, (self.settings.model,))

    async def _start_links(self) -> None:
        for name, instance in self.instances.items():
            for group in _CALLERS[instance.service]:
                await self._start_link(f"{group}->{name}", partial(getattr, instance, "address"))
            if instance.service is not Service.GPU_WORKER:
                await self._start_link(f"valkey<-{name}", lambda: urlsplit(self.valkey.url).netloc.rsplit("@")[-1])
                await self._start_link(f"postgres<-{name}", lambda: urlsplit(self.dsn).netloc.rsplit("@")[-1])

    async def _start_link(self, name: str, target: Callable[[], str]) -> None:
        self.links[name] = Link(name, target)
        await self.links[name].start()

    def _spec(self, instance: ServiceInstance) -> ChildSpec:
        settings = self.settings
        context = ServiceContext(
            postgres_dsn=self.dsn,
            redis_urls={},
            models_directory=settings.models_directory,
            engine=settings.engine,
            trace_directory=settings.home.traces,
            log_directory=settings.home.logs,
            internal_token=self._password,
            base_environment=dict(os.environ),
            overrides=settings.environment,
        )
        spec = service_spec(instance, list(self.instances.values()), context)
        environment = {**(spec.environment or {}), **self._through_links(instance)}
        environment.pop("SLUICE_TRACE_DIR", None)
        return dataclasses.replace(spec, environment=environment)

    def _through_links(self, instance: ServiceInstance) -> dict[str, str]:
        """The addresses of others, replaced by those of the links."""
        name = instance.name
        from_group = "workers" if instance.service is Service.GPU_WORKER else "gateways"
        schedulers = ",".join(self.links[f"{from_group}->{n}"].address for n in self.names(Service.SCHEDULER))
        if instance.service is Service.GPU_WORKER:
            return {
                "SLUICE_SCHEDULERS": schedulers,
                "SLUICE_WORKER_ADVERTISE": self.links[f"schedulers->{name}"].address,
            }
        stores = {
            "SLUICE_REDIS_URL": _moved(
                self.valkey.url_of(instance.service.value), self.links[f"valkey<-{name}"].address
            ),
            "SLUICE_POSTGRES_DSN": _moved(self.dsn, self.links[f"postgres<-{name}"].address),
        }
        if instance.service is Service.GATEWAY:
            return {**stores, "SLUICE_SCHEDULERS": schedulers}
        own = f"{name}:{self._password}"  # the database user by whom the witnesses know it
        stores["SLUICE_POSTGRES_DSN"] = _moved(self.dsn, self.links[f"postgres<-{name}"].address, credentials=own)
        return {**stores, "SLUICE_SCHEDULER_ID": name}


def _moved(url: str, address: str, *, credentials: str | None = None) -> str:
    parts = urlsplit(url)
    own = credentials or parts.netloc.rsplit("@", 1)[0]
    return urlunsplit(parts._replace(netloc=f"{own}@{address}"))


async def _create_key(dsn: str) -> str:
    store = PostgresStore(dsn)
    await store.open()
    try:
        return await create_key(store, LOCAL_TENANT)
    finally:
        await store.close()
