"""Typed reading of the fields of config.json. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from service_kit.model_manifest import ModelFilesError


class UnsupportedModelError(ModelFilesError):
    """The native engine does not compute this model; `field` names the config field, and the reason is told."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"config.json: {field}: {message}")
        self.field = field
        self.reason = message


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFields:
    """An object of config.json. `prefix` is put before names in errors; `defaults` are what absent fields mean.

    Each method raises UnsupportedModelError. A null counts as absent, but for `whole_or_none`.
    """

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    prefix: str = ""

    def value(self, name: str) -> Any:
        value = self.values.get(name)
        return self.defaults.get(name) if value is None else value

    def refuse(self, name: str, message: str) -> UnsupportedModelError:
        """The error to raise about a field."""
        return UnsupportedModelError(self.prefix + name, message)

    def whole(self, name: str) -> int:
        """A positive whole number."""
        value = self.value(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refuse(name, f"{value!r} is not a positive whole number")
        return value

    def whole_or_none(self, name: str) -> int | None:
        """A positive whole number, or None if the field is null, or absent without a default."""
        is_null = name in self.values and self.values[name] is None
        return None if is_null or self.value(name) is None else self.whole(name)

    def number(self, name: str) -> float:
        """A positive number."""
        value = self.value(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.refuse(name, f"{value!r} is not a positive number")
        return float(value)

    def number_or_none(self, name: str) -> float | None:
        """A positive number, or None if the field is null or absent without a default."""
        return None if self.value(name) is None else self.number(name)

    def flag(self, name: str) -> bool:
        """True or false; false without a default."""
        value = self.value(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.refuse(name, f"{value!r} is not true or false")
        return value

    def per_layer(self, name: str, num_layers: int) -> list[Any] | None:
        """A list with one entry for each layer, or None if there is none."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != num_layers:
            raise self.refuse(name, f"not a list with one entry for each of {num_layers} layers")
        return value
