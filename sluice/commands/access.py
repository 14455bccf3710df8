"""How a command reaches a running service: address, key and model from options, environment, or the local stack."""

import os
import ssl
from pathlib import Path
from typing import Any

from service_kit.health_probe import named_tls
from service_kit.tls import ClientTls
from sluice.client import ClientSettings
from sluice.errors import UserError
from sluice.home import Home
from sluice.retry import RetryPolicy
from sluice.run_file import decode_tls, read_run_file

SYSTEM_CA = "system"
"""In the place of a file: the authorities that gRPC trusts by itself."""


def client_settings(
    home: Home,
    *,
    target: str | None,
    api_key: str | None,
    ca_cert: str | None = None,
    retry: RetryPolicy | None = None,
) -> ClientSettings:
    """Option, then SLUICE_TARGET, SLUICE_API_KEY and SLUICE_CA_CERT, then the stack that runs in `home`. Raises UserError."""
    targets = (target or os.environ.get("SLUICE_TARGET", "")).split(",")
    addresses = tuple(address.strip() for address in targets if address.strip())
    trusted = ca_cert or os.environ.get("SLUICE_CA_CERT")
    tls = _tls_of(trusted) if trusted else None
    if not addresses:
        addresses, local_tls = _local_gateways(home)
        tls = tls or local_tls
    return ClientSettings(
        targets=addresses,
        api_key=api_key or os.environ.get("SLUICE_API_KEY") or _local_key(home),
        retry=retry or RetryPolicy(),
        tls=tls,
    )


def local_model(home: Home) -> str | None:
    """The model of the stack that runs in `home`, the first of several; None when none does."""
    try:
        return str(read_run_file(home.run_file)["models"][0])
    except (UserError, LookupError):
        return None


def _tls_of(trusted: str) -> ClientTls:
    if trusted == SYSTEM_CA:
        return ClientTls()
    tls = ClientTls(ca=Path(trusted))
    try:
        ssl.create_default_context(cafile=trusted)
    except OSError as error:
        raise UserError(f"the CA certificate {trusted} cannot be used: {error}") from None
    return tls


def _local_gateways(home: Home) -> tuple[tuple[str, ...], ClientTls | None]:
    """Their addresses, and how to talk to them."""
    services: Any = read_run_file(home.run_file).get("services", {})
    gateways = [entry for entry in services.values() if entry["service"] == "gateway"]
    if not gateways:
        raise UserError("the sluice that runs here is still starting; try again in a moment")
    addresses = tuple(entry["address"] for entry in gateways)
    tls = decode_tls(gateways[0].get("tls"))
    try:
        return addresses, named_tls(addresses[0], tls) if tls is not None else None
    except OSError as error:
        raise UserError(f"the gateway at {addresses[0]} cannot be reached: {error}") from None


def _local_key(home: Home) -> str:
    try:
        return home.api_key.read_text().strip()
    except OSError:
        raise UserError("no API key; give one with --api-key or SLUICE_API_KEY") from None
