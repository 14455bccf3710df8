"""A quantized model of the cache: made once, the same each time, listed, served and evaluated like any other."""

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gpu_worker.artifacts.weights import WeightsError
from gpu_worker.engine.loading import load_native_engine
from gpu_worker.engine.settings import EngineSettings, EngineStartError
from gpu_worker.kernels.library import load_cpu_kernels
from service_kit.model_manifest import list_manifests, read_manifest
from sluice.__main__ import build_app
from sluice.errors import UserError
from sluice.home import Home, find_home
from sluice.models.evaluate import evaluate, related_models, render
from sluice.models.quantize import quantize
from tests.support.engine_runs import make_spec, run_to_end
from tests.support.tiny_models import encode, make_simulated_model, make_tiny_llama

SETTINGS = EngineSettings(threads=1, num_blocks=20, max_running=3)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A cache with a model, its int8 form, and a simulated model."""
    home = find_home(tmp_path_factory.mktemp("home"))
    make_tiny_llama(home.models / "tiny", name="tiny", tied=True, context_length=256)
    make_simulated_model(home.models / "sim", name="sim")
    quantize(home, "tiny", "tiny-int8", lambda _: None)
    return home


def test_the_model_is_complete_and_of_its_own_key(home: Home) -> None:
    source, made = read_manifest(home.models / "tiny"), read_manifest(home.models / "tiny-int8")
    assert (made.precision, made.vocab_size, made.eos_token_ids) == ("int8", source.vocab_size, source.eos_token_ids)
    assert made.revision != source.revision
    weights = [home.models / name / "model.safetensors" for name in ("tiny", "tiny-int8")]
    assert weights[1].stat().st_size < weights[0].stat().st_size
    assert list_manifests(home.models)["tiny-int8"] == home.models / "tiny-int8"


def test_making_it_again_gives_the_same_bits(home: Home) -> None:
    again = quantize(home, "tiny", "again", lambda _: None)
    assert again.revision == read_manifest(home.models / "tiny-int8").revision


def test_it_is_served_with_int8_products(home: Home) -> None:
    outputs = []
    for _ in range(2):
        engine = load_native_engine(home.models / "tiny-int8", settings=SETTINGS)
        assert engine.capabilities().precision == "int8"
        assert engine.capabilities().is_batch_invariant == (load_cpu_kernels() is not None)
        outputs.append(run_to_end(engine, [make_spec("a", encode("some words"))])["a"].token_ids)
    assert len(outputs[0]) == 20
    assert outputs[0] == outputs[1]


def test_it_needs_fp32_around_its_products(home: Home) -> None:
    with pytest.raises(EngineStartError, match="dtype 'bfloat16': a model of precision int8"):
        load_native_engine(home.models / "tiny-int8", settings=dataclasses.replace(SETTINGS, dtype="bfloat16"))


def test_a_manifest_that_claims_the_wrong_precision_is_found_out(home: Home, tmp_path: Path) -> None:
    for path in (home.models / "tiny-int8").iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "sluice-model.json").unlink()
    dataclasses.replace(read_manifest(home.models / "tiny-int8"), precision="fp32").write(tmp_path)
    with pytest.raises(WeightsError, match="weight_scale"):
        load_native_engine(tmp_path, settings=SETTINGS)


@pytest.mark.parametrize(
    ("name", "out", "reason"),
    [
        ("absent", "x", "absent is not in"),
        ("tiny", "tiny-int8", "is there already"),
        ("tiny-int8", "x", "of precision int8; only fp32"),
        ("sim", "x", "cannot be quantized"),
        ("tiny", "../x", "not a model name"),
    ],
)
def test_what_cannot_be_quantized_is_refused(home: Home, name: str, out: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        quantize(home, name, out, lambda _: None)
    assert "x" not in list_manifests(home.models)


def test_a_model_is_evaluated_beside_what_it_was_made_from(home: Home) -> None:
    assert related_models(home, "tiny-int8")[0] == "tiny"
    assert set(related_models(home, "tiny")) >= {"tiny", "tiny-int8"}
    with pytest.raises(UserError, match="absent is not in"):
        related_models(home, "absent")
    found = list(evaluate(home, ["tiny", "tiny-int8"], kv_dtypes=("float32", "float16"), max_windows=4))
    assert [(each.precision, each.kv_dtype) for each in found] == [
        ("fp32", "float32"), ("fp32", "float16"), ("int8", "float32"), ("int8", "float16"),
    ]  # fmt: skip
    first = found[0].perplexity
    for each in found[1:]:
        assert each.perplexity != first, "the weights and the memory are others"
        assert each.perplexity == pytest.approx(first, rel=0.01)
    lines = render(found)
    assert len(lines) == 5
    assert lines[3].endswith(f"{100 * (found[2].perplexity / first - 1):+.2f} %")


def test_the_commands_print_what_they_made(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_HOME", str(home.root))
    run = CliRunner().invoke(build_app(["models"]), ["models", "quantize", "tiny", "--out", "of-command"])
    assert run.exit_code == 0, run.output
    listed = CliRunner().invoke(build_app(["models"]), ["models", "list"])
    assert "of-command                   int8, context 256" in listed.output
    shown = CliRunner().invoke(
        build_app(["models"]), ["models", "evaluate", "of-command", "--kv", "float32", "--windows", "1"]
    )
    assert shown.exit_code == 0, shown.output
    assert "of-command" in shown.output
