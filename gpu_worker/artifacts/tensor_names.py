"""Whether a checkpoint has the tensors that its config asks for. Pure."""

from collections.abc import Set as AbstractSet
from pathlib import Path

from service_kit.model_manifest import ModelFilesError

_NAMES_SHOWN = 5


class WeightsError(ModelFilesError):
    """Tensors that are missing, unexpected, of another shape or type, each named."""


def require_same_names(model: Path, wanted: AbstractSet[str], found: AbstractSet[str]) -> None:
    """Raises WeightsError unless the two are the same names."""
    for kind, names in (("missing", sorted(wanted - found)), ("unexpected", sorted(found - wanted))):
        if names:
            more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            raise WeightsError(f"{model}: {kind} tensors: {', '.join(names[:_NAMES_SHOWN])}{more}")
