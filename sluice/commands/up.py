"""`sluice up`: the whole service on this machine, until Ctrl-C."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from service_kit.ids import TenantId
from sluice.commands.database import with_store
from sluice.commands.models import DEFAULT_MODEL, DEFAULT_SIMULATED_MODEL, require_model
from sluice.console import PrefixedLog
from sluice.home import Home, find_home
from sluice.keys import ADMIN_TENANT, LOCAL_TENANT, keep_or_create_key
from sluice.local.server_state import write_private
from sluice.local.services import Service
from sluice.local.stack import LocalStack, StackSettings
from sluice.models.bring import bring_gguf, is_file_name
from sluice.models.bring_directory import bring_directory, is_directory_name
from state_store.postgres.migrate import upgrade

_START_TIMEOUT_S = 180.0
_SUPERVISE_S = 0.25
_MAX_REPLICAS = 16


class Engine(StrEnum):
    """What computes: the native engine with real weights, or the simulated one."""

    NATIVE = "native"
    SIMULATED = "simulated"


def up_command(
    *,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "Model to serve: its name in the cache, a GGUF file, or a directory (with a slash in it); "
                "give the option again for each further one."
            )
        ),
    ] = None,
    engine: Annotated[
        Engine, typer.Option(help="native, or simulated: no model, for trying things out.")
    ] = Engine.NATIVE,
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port of the gateway, of the first if there are more; 0 takes a free one."),
    ] = 50051,
    gateways: Annotated[int, typer.Option(min=1, max=_MAX_REPLICAS, help="Gateway processes.")] = 1,
    schedulers: Annotated[int, typer.Option(min=1, max=_MAX_REPLICAS, help="Scheduler processes.")] = 1,
    workers: Annotated[int, typer.Option(min=1, max=_MAX_REPLICAS, help="Worker processes for each model.")] = 1,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where everything lies; default: SLUICE_HOME or .sluice.")
    ] = None,
) -> None:
    """Run Postgres, Valkey, gateways, schedulers and workers here; Ctrl-C stops them all."""
    home = find_home(data_dir)
    asked = model or [DEFAULT_MODEL if engine is Engine.NATIVE else DEFAULT_SIMULATED_MODEL]
    names = tuple(dict.fromkeys(_bring(home, each) for each in asked))
    for name in names:
        require_model(home, name, engine=engine.value)
    settings = StackSettings(
        home=home,
        models_directory=home.models,
        models=names,
        engine=engine.value,
        gateway_port=port or None,
        counts={Service.GATEWAY: gateways, Service.SCHEDULER: schedulers, Service.GPU_WORKER: workers},
    )
    log = PrefixedLog()
    stack = LocalStack(settings, on_line=log)
    with stop_signals() as stop:
        try:
            start(stack, home, stop)
            if not stop.is_set():
                for instance in stack.instances:
                    served = f" with {instance.model}" if instance.model else ""
                    log("sluice", f"{instance.name} at {instance.address}{served}")
                kinds = f"{_count_models(names)}, engine {engine.value}"
                log("sluice", f"ready: gateway {' and '.join(stack.gateways)}, {kinds}")
                log("sluice", 'try in another terminal: sluice generate "What is the capital of France?"')
            while not stop.wait(_SUPERVISE_S):
                stack.supervise_once()
            log("sluice", "stopping")
        finally:
            stack.stop()
    log("sluice", "stopped")


def _bring(home: Home, text: str) -> str:
    """The name of the model that `text` means, which is in the cache then if it names a file or a directory."""
    if is_file_name(text):
        return bring_gguf(home, text)
    return bring_directory(home, text) if is_directory_name(text) else text


def _count_models(names: tuple[str, ...]) -> str:
    return f"model {names[0]}" if len(names) == 1 else f"models {' and '.join(names)}"


def start(stack: LocalStack, home: Home, stop: threading.Event) -> None:
    """Everything, until it serves or `stop` is set. Raises UserError; the caller stops the stack in any case."""
    stack.start_servers()
    if stop.is_set():
        return
    upgrade(stack.dsn)
    _ensure_key(stack.dsn, home.api_key, LOCAL_TENANT)
    _ensure_key(stack.dsn, home.admin_key, ADMIN_TENANT, is_admin=True)
    if stop.is_set():
        return
    stack.start_services()
    stack.wait_serving(timeout_s=_START_TIMEOUT_S, has_to_stop=stop.is_set)


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set, instead of breaking into whatever runs."""
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda *_: stop.set())
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ensure_key(dsn: str, path: Path, tenant_id: TenantId, *, is_admin: bool = False) -> None:
    """A key that works, in `path`, readable by its owner only."""
    try:
        text = path.read_text().strip()
    except OSError:
        text = ""
    kept = with_store(dsn, lambda store: keep_or_create_key(store, text, tenant_id, is_admin=is_admin))
    if kept != text:
        write_private(path, f"{kept}\n")
