"""`run.json`: what runs in a home, for the commands that talk to it."""

import json
from pathlib import Path
from typing import Any

from sluice.errors import UserError


def read_run_file(path: Path) -> dict[str, Any]:
    """What runs here. Raises UserError when nothing does."""
    try:
        run: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        raise UserError("no sluice runs here; start one with: sluice up") from None
    return run
