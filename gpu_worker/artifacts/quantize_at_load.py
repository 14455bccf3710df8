"""Makes an int8 model of one that transformers computes: its weights are rounded whenever it is loaded.

Without smoothing, because what comes before a product is not ours to know. The files are the same ones, linked: the model
needs the memory of an int8 model once it is loaded, but no less disk.
"""

import json
from dataclasses import replace
from pathlib import Path

from gpu_worker.engine.settings import INT8_PRECISION
from service_kit.model_manifest import MANIFEST_NAME, ModelManifest, content_revision

_SUFFIXES = (".safetensors", ".json", ".jinja")


def mark_as_int8(source: Path, target: Path, manifest: ModelManifest, *, name: str) -> ModelManifest:
    """Fills `target` with links to the files of `source`, how it is rounded, and a manifest.

    Raises UnsupportedArchitectureError for what transformers does not compute for us.
    """
    # Only here is transformers loaded: importing it takes seconds.
    from gpu_worker.models.transformers_model import check_served  # noqa: PLC0415

    check_served(source)
    for path in sorted(source.iterdir()):
        if path.suffix in _SUFFIXES and path.name != MANIFEST_NAME:
            (target / path.name).symlink_to(path.resolve())
    recipe = {"source": manifest.model, "source_revision": manifest.revision, "method": "rounded at load"}
    (target / "quantization.json").write_text(json.dumps(recipe, indent=2) + "\n")
    made = replace(manifest, model=name, revision=content_revision(target), precision=INT8_PRECISION)
    made.write(target)
    return made
