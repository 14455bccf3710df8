"""Where a person's Sluice keeps its things: `$SLUICE_HOME`, or `.sluice` in the working directory."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Paths under one root. Only `create` writes."""

    root: Path

    @property
    def models(self) -> Path:
        """One directory per model."""
        return self.root / "models"

    @property
    def partial(self) -> Path:
        """Work in progress; what a killed process left here is removed by the next one. It lies with the models, which may
        be a volume of their own: what is finished is put in place by a rename."""
        return self.models / ".partial"

    @property
    def postgres(self) -> Path:
        return self.root / "postgres"

    @property
    def valkey(self) -> Path:
        return self.root / "valkey"

    @property
    def traces(self) -> Path:
        return self.root / "traces"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def run_file(self) -> Path:
        """Addresses and pids of the running stack; absent when none runs."""
        return self.root / "run.json"

    @property
    def lock(self) -> Path:
        """Held by the process that runs the stack."""
        return self.root / "stack.lock"

    @property
    def api_key(self) -> Path:
        """The key that `sluice generate` uses; readable by its owner only."""
        return self.root / "api-key"

    @property
    def admin_key(self) -> Path:
        """The key of whoever administers the local stack; readable by its owner only."""
        return self.root / "admin-key"

    def create(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)


def find_home(root: Path | None = None) -> Home:
    """The home at `root`, else at `$SLUICE_HOME`, else `.sluice` in the working directory."""
    chosen = root or Path(os.environ.get("SLUICE_HOME") or ".sluice")
    return Home(root=chosen.absolute())
