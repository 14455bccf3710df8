"""Typed reading of environment variables. Only composition roots use it; errors name the variable."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path


class EnvironmentVariableError(Exception):
    """A variable that is missing or not what it should be."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


class Environment:
    """A mapping of variables read as types. A variable that is set but empty counts as unset."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    def optional_text(self, name: str) -> str | None:
        return self._variables.get(name, "").strip() or None

    def text(self, name: str, default: str | None = None) -> str:
        """The value, or the default; without a default the variable is required."""
        value = self.optional_text(name)
        if value is not None:
            return value
        if default is None:
            raise EnvironmentVariableError(name, "must be set")
        return default

    def integer(self, name: str, default: int, *, minimum: int, maximum: int) -> int:
        value = self.optional_text(name)
        if value is None:
            return default
        try:
            number = int(value)
        except ValueError:
            raise EnvironmentVariableError(name, f"{value!r} is not a whole number") from None
        if not minimum <= number <= maximum:
            raise EnvironmentVariableError(name, f"{number} is not from {minimum} to {maximum}")
        return number

    def number(self, name: str, default: float, *, minimum: float, maximum: float) -> float:
        value = self.optional_text(name)
        if value is None:
            return default
        try:
            number = float(value)
        except ValueError:
            raise EnvironmentVariableError(name, f"{value!r} is not a number") from None
        if not minimum <= number <= maximum:
            raise EnvironmentVariableError(name, f"{number} is not from {minimum} to {maximum}")
        return number

    def seconds(self, name: str, default: timedelta, *, minimum: timedelta, maximum: timedelta) -> timedelta:
        """A duration written as seconds, with a fraction if wanted."""
        return timedelta(
            seconds=self.number(
                name,
                default.total_seconds(),
                minimum=minimum.total_seconds(),
                maximum=maximum.total_seconds(),
            )
        )

    def boolean(self, name: str, *, default: bool) -> bool:
        value = self.optional_text(name)
        if value is None:
            return default
        known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if value.lower() not in known:
            raise EnvironmentVariableError(name, f"{value!r} is not one of {', '.join(known)}")
        return known[value.lower()]

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        value = self.text(name, default)
        if value not in choices:
            raise EnvironmentVariableError(name, f"{value!r} is not one of {', '.join(choices)}")
        return value

    def texts(self, name: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """A comma-separated list without empty items; at least one unless there is a default."""
        value = self.optional_text(name)
        items = tuple(item.strip() for item in (value or "").split(",") if item.strip())
        if items:
            return items
        if default is None:
            raise EnvironmentVariableError(name, "must list at least one value")
        return default

    def optional_path(self, name: str) -> Path | None:
        value = self.optional_text(name)
        return Path(value) if value is not None else None

    def path(self, name: str, default: Path | None = None) -> Path:
        return Path(self.text(name, str(default) if default is not None else None))
