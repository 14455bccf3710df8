"""`run.json`: what runs in a home, for the commands that talk to it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service_kit.tls import ClientTls
from sluice.errors import UserError


def read_run_file(path: Path) -> dict[str, Any]:
    """What runs here. Raises UserError when nothing does."""
    try:
        run: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        raise UserError("no sluice runs here; start one with: sluice up") from None
    return run


def encode_tls(tls: ClientTls | None) -> dict[str, str] | None:
    """How to talk to a service, as JSON; None: plainly."""
    if tls is None:
        return None
    fields = {"ca": tls.ca, "certificate": tls.certificate, "key": tls.key, "server_name": tls.server_name}
    return {
        name: str(Path(value).absolute()) if name != "server_name" else str(value)
        for name, value in fields.items()
        if value
    }


def decode_tls(fields: Mapping[str, str] | None) -> ClientTls | None:
    if fields is None:
        return None
    paths = {name: Path(value) for name, value in fields.items() if name != "server_name"}
    return ClientTls(**paths, server_name=fields.get("server_name"))
