"""`sluice models`: what is in the local model cache, and how it gets there."""

from enum import StrEnum
from typing import Annotated

import typer

from service_kit.model_manifest import MANIFEST_NAME, ModelManifest, find_model, list_manifests, read_manifest
from sluice.console import progress_bars, say, write_text
from sluice.errors import UserError
from sluice.home import Home, find_home
from sluice.models.catalogue import CATALOGUE, find_entry
from sluice.models.evaluate import WINDOW, evaluate, related_models, render
from sluice.models.pull import building, pull
from sluice.models.quantize import quantize

DEFAULT_MODEL = CATALOGUE[0].name
DEFAULT_SIMULATED_MODEL = "simulated"
_SIMULATED_CONTEXT_LENGTH = 8192
_SIMULATED_PRECISION = "sim"


class KvChoice(StrEnum):
    """Types of KV memory that a model is evaluated with."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BOTH = "both"


app = typer.Typer(help="Models on this machine.", no_args_is_help=True)


@app.command("pull")
def pull_command(name: Annotated[str, typer.Argument(help="Model to fetch.")] = DEFAULT_MODEL) -> None:
    """Download a model, check it, and convert it once."""
    pull_with_bars(find_home(), name)


@app.command("list")
def list_command() -> None:
    """Models in the cache, and those that can be pulled."""
    home = find_home()
    cached = list_manifests(home.models)
    for name, directory in cached.items():
        manifest = read_manifest(directory)
        fields = f"{manifest.precision}, context {manifest.context_length}, revision {manifest.revision}"
        write_text(f"{name:<28} {fields}\n")
    for entry in CATALOGUE:
        if entry.name not in cached:
            write_text(f"{entry.name:<28} not here yet: sluice models pull {entry.name}  ({entry.description})\n")


@app.command("quantize")
def quantize_command(
    name: Annotated[str, typer.Argument(help="An fp32 model of the cache.")] = DEFAULT_MODEL,
    out: Annotated[str | None, typer.Option(help="Name of the new model; default: NAME-int8.")] = None,
) -> None:
    """Make an int8 model of an fp32 one: less memory, about twice as fast."""
    home = find_home()
    with progress_bars() as on_progress:
        manifest = quantize(home, name, out or f"{name}-int8", lambda fraction: on_progress("quantizing", fraction))
    say(f"{manifest.model} is in {home.models / manifest.model}, revision {manifest.revision}")


@app.command("evaluate")
def evaluate_command(
    name: Annotated[str, typer.Argument(help="A model of the cache.")] = DEFAULT_MODEL,
    kv: Annotated[KvChoice, typer.Option(help="Type of the KV memory.")] = KvChoice.BOTH,
    windows: Annotated[int | None, typer.Option(min=1, help="Only so many windows of 1,024 tokens.")] = None,
) -> None:
    """Print a model's perplexity on a fixed text, beside those of the models that it was quantized from or to."""
    home = find_home()
    models = related_models(home, name)
    kv_dtypes = ("float32", "float16") if kv is KvChoice.BOTH else (kv.value,)
    with progress_bars() as on_progress:
        found = list(evaluate(home, models, kv_dtypes=kv_dtypes, max_windows=windows, on_progress=on_progress))
    for line in render(found):
        write_text(f"{line}\n")
    write_text(f"{found[0].num_tokens} tokens in windows of {WINDOW}\n")


@app.command("make-simulated")
def make_simulated_command(
    name: Annotated[str, typer.Argument(help="Name of the new model.")] = DEFAULT_SIMULATED_MODEL,
    context_length: Annotated[int, typer.Option(min=16, help="Prompt and output together, tokens.")] = (
        _SIMULATED_CONTEXT_LENGTH
    ),
) -> None:
    """Make a model without weights for the simulated engine."""
    home = find_home()
    if (home.models / name / MANIFEST_NAME).exists():
        raise UserError(f"{name} is there already; choose another name or remove {home.models / name}")
    make_simulated(home, name, context_length=context_length)
    say(f"{name} is in {home.models / name}")


def pull_with_bars(home: Home, name: str) -> ModelManifest:
    """The model in the cache, fetched when it is not there, with bars on the terminal. Raises UserError."""
    entry = find_entry(name)
    if (home.models / entry.name / MANIFEST_NAME).exists():
        say(f"{name} is there already, in {home.models / name}")
        return read_manifest(home.models / name)
    say(f"{name}: {entry.description}; licence {entry.licence}")
    with progress_bars() as on_progress:
        manifest, _ = pull(home, entry, on_progress)
    say(f"{name} is in {home.models / name}, revision {manifest.revision}")
    return manifest


def make_simulated(home: Home, name: str, *, context_length: int = _SIMULATED_CONTEXT_LENGTH) -> None:
    """Put a simulated model into the cache. Raises UserError for a bad name."""
    from gpu_worker.artifacts.simulated_model import write_simulated_model  # noqa: PLC0415 - loads tokenizers

    with building(home, name) as (work, publish):
        built = work / "model"
        write_simulated_model(built, name=name, context_length=context_length)
        publish(built)


def require_model(home: Home, name: str, *, engine: str) -> ModelManifest:
    """The manifest of a model that `engine` can run. A simulated one is made when absent. Raises UserError."""
    if engine == "simulated" and not (home.models / name / MANIFEST_NAME).exists():
        make_simulated(home, name)
    found = find_model(home.models, name)
    if found is None:
        raise UserError(f"the model {name} is not in {home.models}; fetch it with: sluice models pull {name}")
    manifest = read_manifest(found)
    fitting = "simulated" if manifest.precision == _SIMULATED_PRECISION else "native"
    if engine != fitting:
        raise UserError(f"the model {name} is for the {fitting} engine; use --engine {fitting} or another --model")
    return manifest
