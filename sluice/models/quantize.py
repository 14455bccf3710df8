"""`sluice models quantize`: a model of the cache becomes another one with int8 weights."""

from collections.abc import Callable

from service_kit.model_manifest import MANIFEST_NAME, ModelFilesError, ModelManifest, find_model
from sluice.errors import UserError
from sluice.home import Home
from sluice.models.pull import building


def quantize(home: Home, name: str, out: str, on_progress: Callable[[float], None]) -> ModelManifest:
    """Put model `out`, the int8 form of model `name`, into the cache. Raises UserError; nothing half done stays."""
    source, target = find_model(home.models, name), home.models / out
    if source is None:
        raise UserError(f"the model {name} is not in {home.models}; fetch it with: sluice models pull {name}")
    if (target / MANIFEST_NAME).exists():
        raise UserError(f"{out} is there already; choose another name with --out or remove {target}")
    from gpu_worker.artifacts.quantize import quantize_directory  # noqa: PLC0415 - loads torch
    from gpu_worker.models.config import UnsupportedModelError  # noqa: PLC0415

    with building(home, out) as (work, publish):
        built = work / "model"
        built.mkdir()
        try:
            manifest = quantize_directory(source, built, name=out, on_progress=on_progress)
        except (ModelFilesError, UnsupportedModelError) as error:
            raise UserError(f"{name} cannot be quantized: {error}") from error
        publish(built)
    return manifest
