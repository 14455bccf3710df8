"""`sluice models evaluate`: how well models predict the evaluation text, through the engine that serves them."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from service_kit.model_manifest import ModelFilesError, list_manifests, read_manifest
from service_kit.tokenizer_files import read_tokenizer_text
from sluice.errors import UserError
from sluice.home import Home

WINDOW = 1024
_BLOCK_SIZE = 16
_STEP_TOKENS = 512
_RECIPE_NAME = "quantization.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One model with one type of KV memory."""

    model: str
    precision: str
    kv_dtype: str
    perplexity: float
    num_tokens: int


def related_models(home: Home, name: str) -> list[str]:
    """`name` with the model that it was quantized from, if that is here, and those that were quantized from it.

    The unquantized one comes first. Raises UserError when `name` is not here.
    """
    directories = list_manifests(home.models)
    if name not in directories:
        raise UserError(f"the model {name} is not in {home.models}; those that are: {', '.join(directories) or 'none'}")
    origin_by_model = {model: _origin(directory) for model, directory in directories.items()}
    key_by_model = {model: (model, read_manifest(directory).revision) for model, directory in directories.items()}
    source = next((model for model, key in key_by_model.items() if key == origin_by_model[name]), name)
    made = [model for model, origin in origin_by_model.items() if origin == key_by_model[source]]
    return [source, *(model for model in made if model != source)] if name in (source, *made) else [name]


def _origin(directory: Path) -> tuple[str, str] | None:
    """Name and revision of the model that this one was quantized from."""
    path = directory / _RECIPE_NAME
    if not path.exists():
        return None
    try:
        recipe = json.loads(path.read_text())
        return str(recipe["source"]), str(recipe["source_revision"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a quantization recipe: {error}") from error


def evaluate(
    home: Home,
    models: list[str],
    *,
    kv_dtypes: tuple[str, ...],
    max_windows: int | None = None,
    on_progress: Callable[[str, float], None] = lambda _stage, _fraction: None,
) -> Iterator[Evaluation]:
    """Each model with each type of KV memory, as they are done. Raises UserError."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - these load torch

    from gpu_worker.artifacts.texts import EVALUATION  # noqa: PLC0415
    from gpu_worker.engine.loading import load_parts  # noqa: PLC0415
    from gpu_worker.engine.perplexity import measure_perplexity  # noqa: PLC0415
    from gpu_worker.engine.settings import EngineSettings, EngineStartError  # noqa: PLC0415
    from gpu_worker.models.config import UnsupportedModelError  # noqa: PLC0415

    directories = list_manifests(home.models)
    settings = EngineSettings(block_size=_BLOCK_SIZE, token_budget=_STEP_TOKENS, max_running=1)
    for model in models:
        tokenizer = Tokenizer.from_str(read_tokenizer_text(directories[model]))
        token_ids = tokenizer.encode(EVALUATION.read(), add_special_tokens=False).ids
        num_windows = min(max_windows or len(token_ids), len(token_ids) // WINDOW)
        for kv_dtype in kv_dtypes:
            try:
                parts = load_parts(directories[model], replace(settings, kv_dtype=kv_dtype))
            except (ModelFilesError, UnsupportedModelError, EngineStartError) as error:
                raise UserError(f"{model} cannot be evaluated: {error}") from error
            window = min(WINDOW, parts.capabilities.context_length)
            perplexity = measure_perplexity(
                parts.runner,
                token_ids[: num_windows * window],
                window=window,
                step_tokens=_STEP_TOKENS,
                block_size=_BLOCK_SIZE,
                on_progress=lambda fraction, stage=f"{model}, {kv_dtype} KV": on_progress(stage, fraction),  # type: ignore[misc]
            )
            yield Evaluation(
                model=model,
                precision=parts.capabilities.precision,
                kv_dtype=kv_dtype,
                perplexity=perplexity,
                num_tokens=num_windows * window,
            )


def render(evaluations: list[Evaluation]) -> list[str]:
    """A line for each, with the difference to the first with the same type of KV memory."""
    lines = [f"{'model':<36} {'weights':<8} {'KV':<9} {'perplexity':>10}   against the first"]
    first_by_kv: dict[str, float] = {}
    for each in evaluations:
        first = first_by_kv.setdefault(each.kv_dtype, each.perplexity)
        percent = 100 * (each.perplexity / first - 1)
        against = "" if each.perplexity == first else f"{percent:+.2f} %"
        lines.append(
            f"{each.model:<36} {each.precision:<8} {each.kv_dtype:<9} {each.perplexity:>10.3f}   {against}".rstrip()
        )
    return lines
