"""What a local server keeps beside its data, so that a restart has the same port and password."""

import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from sluice.local.child import free_port, is_port_free


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """Port on 127.0.0.1 and password of one local server."""

    port: int
    password: str


def load_or_create(path: Path, *, port: int | None) -> ServerState:
    """The stored state, with another port where the old one is taken by somebody else. `port` forces one. Writes 0600."""
    try:
        state = ServerState(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        state = ServerState(port=port or free_port(), password=secrets.token_urlsafe(24))
    if port is not None and state.port != port:
        state = ServerState(port=port, password=state.password)
    elif port is None and not is_port_free(state.port):
        state = ServerState(port=free_port(), password=state.password)
    write_private(path, json.dumps(asdict(state)) + "\n")
    return state


def write_private(path: Path, text: str) -> None:
    """Replace `path` by `text`, readable by its owner only, in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)
