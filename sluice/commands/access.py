"""How a command reaches a running service: address, key and model from options, environment, or the local stack."""

import os
from typing import Any

from sluice.client import ClientSettings
from sluice.errors import UserError
from sluice.home import Home
from sluice.retry import RetryPolicy
from sluice.run_file import read_run_file


def client_settings(
    home: Home, *, target: str | None, api_key: str | None, retry: RetryPolicy | None = None
) -> ClientSettings:
    """Option, then SLUICE_TARGET and SLUICE_API_KEY, then the stack that runs in `home`. Raises UserError."""
    targets = (target or os.environ.get("SLUICE_TARGET", "")).split(",")
    addresses = tuple(address.strip() for address in targets if address.strip())
    return ClientSettings(
        targets=addresses or _local_gateways(home),
        api_key=api_key or os.environ.get("SLUICE_API_KEY") or _local_key(home),
        retry=retry or RetryPolicy(),
    )


def local_model(home: Home) -> str | None:
    """The model of the stack that runs in `home`; None when none does."""
    try:
        return str(read_run_file(home.run_file)["model"])
    except (UserError, KeyError):
        return None


def _local_gateways(home: Home) -> tuple[str, ...]:
    services: Any = read_run_file(home.run_file).get("services", {})
    addresses = tuple(entry["address"] for entry in services.values() if entry["service"] == "gateway")
    if not addresses:
        raise UserError("the sluice that runs here is still starting; try again in a moment")
    return addresses


def _local_key(home: Home) -> str:
    try:
        return home.api_key.read_text().strip()
    except OSError:
        raise UserError("no API key; give one with --api-key or SLUICE_API_KEY") from None
