"""The whole service as separate OS processes, for end-to-end tests, with ways to hurt each of them."""

import asyncio
import json
import shutil
import signal
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row
from redis import Redis

from gpu_worker.artifacts.simulated_model import BOS_TOKEN_ID
from gpu_worker.engine.simulated_tokens import expected_output
from service_kit.tls import ClientTls
from sluice.client import ClientSettings, SluiceClient
from sluice.commands.models import make_simulated, require_model
from sluice.commands.up import start
from sluice.home import Home
from sluice.local.health import Health, check_health
from sluice.local.services import Service
from sluice.local.stack import LocalStack, StackSettings
from sluice.retry import RetryPolicy

MODEL = "simulated"
_START_TIMEOUT_S = 60.0
_POLL_S = 0.05


class RunningStack:
    """A started stack. `heal` brings back whatever a test has hurt."""

    def __init__(self, stack: LocalStack, home: Home, lines: list[tuple[str, str]]) -> None:
        self.local = stack
        self.home = home
        self.lines = lines
        self.crash_file = home.root / "crash-point"
        self.tls: ClientTls | None = None
        """How clients talk to the gateways; None: plainly."""

    @property
    def api_key(self) -> str:
        return self.home.api_key.read_text().strip()

    def client(self, *, targets: tuple[str, ...] | None = None, api_key: str | None = None) -> SluiceClient:
        retry = RetryPolicy(max_delay=timedelta(seconds=1), give_up_after=timedelta(seconds=60))
        settings = ClientSettings(
            targets=targets or tuple(self.local.gateways), api_key=api_key or self.api_key, retry=retry, tls=self.tls
        )
        return SluiceClient(settings)

    def names(self, service: Service) -> list[str]:
        return [instance.name for instance in self.local.instances if instance.service is service]

    def kill(self, name: str) -> None:
        """SIGKILL, and no restart."""
        self.local.services[name].kill()

    def pause(self, name: str) -> None:
        self.local.services[name].send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self.local.services[name].send_signal(signal.SIGCONT)

    def empty_valkey(self) -> None:
        """Kill it, lose its files, start it."""
        self.local.valkey.kill()
        shutil.rmtree(self.home.valkey / "appendonlydir")
        self.local.valkey.start()

    async def heal(self) -> None:
        """Everything runs and serves; what was dead is started again."""
        self.local.postgres.start()
        self.local.valkey.start()
        for name in self.local.services:
            self.resume(name)
            self.local.start_service(name)
        await self.serving(*self.local.services)

    async def serving(self, *names: str) -> None:
        """Waits for the named processes; one that ends by itself meanwhile is started again, as `sluice up` would."""
        addresses = {instance.name: instance.address for instance in self.local.instances if instance.name in names}
        waiting = set(names)

        async def all_serve() -> bool:
            for name in sorted(waiting):
                if not self.local.services[name].is_running:
                    self.local.start_service(name)
                elif await asyncio.to_thread(self._check, name, addresses[name]) is Health.SERVING:
                    waiting.discard(name)
            return not waiting

        try:
            await eventually(all_serve, what="all serve")
        except AssertionError as error:
            tails = {name: self.local.services[name].log_tail(12) for name in waiting}
            raise AssertionError(f"not serving: {tails}") from error

    def _check(self, name: str, address: str) -> Health:
        return check_health(address, tls=self.local.probe_of(name))

    def cut_subscriptions(self) -> None:
        """Every gateway loses its connection for pushes, and what is published before it is back."""
        with Redis.from_url(self.local.valkey.url) as redis:
            redis.client_kill_filter(_type="pubsub", skipme=True)

    def row(self, query: str, *parameters: Any) -> dict[str, Any] | None:
        """First row of a query on the durable record."""
        with psycopg.connect(self.local.dsn, row_factory=dict_row) as connection:
            return connection.execute(query, parameters).fetchone()

    def generation(self, generation_id: str) -> dict[str, Any]:
        found = self.row("SELECT * FROM generations WHERE generation_id = %s", generation_id)
        assert found is not None
        return found

    def owner_of(self, generation_id: str) -> str:
        """Name of the scheduler process that serves the session which runs the generation, by what it logged."""
        session_id = str(self.generation(generation_id)["session_id"])
        opened = (name for name, line in reversed(self.lines) if "session_opened" in line and session_id in line)
        return next(opened)

    async def session_of(self, generation_id: str) -> str:
        """Name of the worker process that runs the generation, once one does."""
        query = (
            "SELECT address FROM worker_sessions JOIN generations USING (session_id)"
            " WHERE generation_id = %s AND generations.state = 'RUNNING'"
        )
        found: list[str] = []

        async def is_running() -> bool:
            row = await asyncio.to_thread(self.row, query, generation_id)
            found.extend([row["address"]] if row else [])
            return bool(found)

        await eventually(is_running, what="the generation runs")
        return next(instance.name for instance in self.local.instances if instance.address == found[0])


@contextmanager
def running_stack(
    *,
    tokens_per_s: float = 50.0,
    counts: dict[Service, int] | None = None,
    engine_settings: dict[str, Any] | None = None,
    overrides: dict[str, str] | None = None,
    native_model: Path | None = None,
    models: tuple[str, ...] = (MODEL,),
    idle_models: tuple[str, ...] = (),
    context_length: int | None = None,
) -> Iterator[RunningStack]:
    """A stack with the simulated engine, or with the native one and the model directory given; stopped and removed at
    the end. `idle_models` are known to the gateways and have no worker; `context_length` is that of `models`."""
    root = Path(tempfile.mkdtemp(prefix="sluice-stack-"))
    root.chmod(0o711)
    home = Home(root=root)
    settings = dict(engine_settings or {})
    if native_model is None:
        for model in models if context_length is not None else ():
            make_simulated(home, model, context_length=context_length)
        for model in (*models, *idle_models):
            require_model(home, model, engine="simulated")
        settings = {"tokens_per_s": tokens_per_s, "has_prompt_faults": True, **settings}
    stack_settings = StackSettings(
        home=home,
        models_directory=home.models if native_model is None else native_model.parent,
        models=models if native_model is None else (native_model.name,),
        engine="simulated" if native_model is None else "native",
        counts=counts or {},
        fsync=False,
        overrides={
            "SLUICE_ENGINE_SETTINGS": json.dumps(settings),
            "SLUICE_CRASH_FILE": str(root / "crash-point"),
            "SLUICE_DRAIN_S": "1",
            **(overrides or {}),
        },
    )
    lines: list[tuple[str, str]] = []
    stack = LocalStack(stack_settings, on_line=lambda name, line: lines.append((name, line)))
    try:
        start(stack, home, threading.Event())
        yield RunningStack(stack, home, lines)
    finally:
        stack.stop()
        shutil.rmtree(root, ignore_errors=True)


async def eventually(
    condition: Callable[[], Awaitable[bool]], *, what: str, timeout_s: float = _START_TIMEOUT_S
) -> None:
    """Bounded polling."""
    try:
        async with asyncio.timeout(timeout_s):
            while not await condition():  # noqa: ASYNC110 - what is polled are other processes
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s:g} s: {what}") from None


def prompt_ids(text: str) -> list[int]:
    """The ids that the gateway makes of a plain-text prompt."""
    return [BOS_TOKEN_ID, *text.encode()]


def simulated_output(text: str, *, seed: int, count: int) -> tuple[int, ...]:
    """What the simulated engine answers to a plain-text prompt."""
    return tuple(expected_output(prompt_token_ids=prompt_ids(text), prior_output=(), seed=seed, nonce=0, count=count))
