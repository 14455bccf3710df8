"""Models of other families, in the whole engine over paged attention, against eager transformers.

The contract of each architecture: with a cache too small for all, so that sequences are cut, preempted and computed again,
and with one that resumes, every row of logits that a token is drawn from is that of one plain forward of its sequence.
"""

import dataclasses
import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_outputs import CausalLMOutput

from gpu_worker.artifacts.quantize import quantize_directory
from gpu_worker.artifacts.weights import WeightsError
from gpu_worker.engine.loading import EngineParts, load_parts, make_engine
from gpu_worker.engine.settings import EngineSettings
from gpu_worker.models import transformers_model
from gpu_worker.models.transformers_attention import Observer
from gpu_worker.models.transformers_check import Probe
from gpu_worker.models.transformers_linears import PackedLinear
from gpu_worker.models.transformers_model import TransformersModel
from gpu_worker.models.transformers_refusals import UnsupportedArchitectureError
from service_kit.model_manifest import read_manifest
from tests.support.engine_runs import make_spec, run_to_end
from tests.support.teacher_forcing import packed_logits
from tests.support.tiny_decoders import REFUSED, SERVED, make_config_only, make_tiny_decoder
from tests.support.tiny_models import encode

TOLERANCE = 1e-4
NUM_OUTPUT = 12
PROMPTS = {
    "long": encode("The quick brown fox jumps over the lazy dog and sleeps in sun."),
    "short": encode("x"),
    "other": encode("Pack my box."),
    "resumed": encode("0123456789 abcdefghijk"),
}
RESUMED_OUTPUT = encode("lmno")
# The long sequence, of a higher class, comes when the others have about 15 blocks, and needs 16 at once.
TIGHT = EngineSettings(threads=1, num_blocks=24, block_size=4, token_budget=20, max_running=4)
LATE, LATE_STEP = "long", 6
CHECK = EngineSettings(threads=1, num_blocks=40, block_size=8)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The directory of a served model."""

    @cache
    def make(name: str) -> Path:
        directory = tmp_path_factory.mktemp("model")
        make_tiny_decoder(directory, *SERVED[name])
        return directory

    return make


def run_recorded(parts: EngineParts, settings: EngineSettings):
    """Tokens of each sequence at its end, and the logits each was drawn from by (sequence, tokens before it)."""
    recorded: dict[tuple[str, int], torch.Tensor] = {}
    compute = parts.runner.logits

    def record(plan):
        rows = compute(plan)
        drawn = [planned for planned in plan.sequences if planned.is_sampled]
        recorded.update(
            {
                (planned.sequence_id, planned.context_length): row.clone()
                for planned, row in zip(drawn, rows, strict=True)
            }
        )
        return rows

    parts.runner.logits = record
    engine = make_engine(parts, settings)
    outputs = {"resumed": RESUMED_OUTPUT}
    specs = {
        name: make_spec(
            name,
            prompt,
            output=outputs.get(name, ()),
            max_output_tokens=NUM_OUTPUT,
            priority=0 if name == LATE else 1,
        )
        for name, prompt in PROMPTS.items()
    }
    late = specs.pop(LATE)

    def after_step():
        engine.check_integrity()
        if engine.load_report().step == LATE_STEP:
            engine.add(late)

    results = run_to_end(engine, specs.values(), after_step=after_step)
    sequences = {name: (*prompt, *outputs.get(name, ()), *results[name].token_ids) for name, prompt in PROMPTS.items()}
    assert engine.load_report().num_preempted > 0
    return sequences, recorded


@pytest.mark.parametrize("name", SERVED)
def test_packed_cut_preempted_and_resumed_logits_are_those_of_eager_transformers(name, made):
    parts = load_parts(made(name), TIGHT)
    sequences, ours = run_recorded(parts, TIGHT)
    eager = AutoModelForCausalLM.from_pretrained(made(name), dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        theirs = {
            key: eager(torch.tensor([token_ids]), use_cache=False).logits[0] for key, token_ids in sequences.items()
        }
    largest = max(float(logits.abs().max()) for logits in theirs.values())
    assert min(float(logits.std()) for logits in theirs.values()) > 0.5, "small logits would compare little"
    errors = {place: float((row - theirs[place[0]][place[1] - 1]).abs().max()) / largest for place, row in ours.items()}
    assert len(errors) == 4 * NUM_OUTPUT - len(RESUMED_OUTPUT)
    print(f"{name}: largest relative difference {max(errors.values()):.1e}")
    assert max(errors.values()) <= TOLERANCE
    assert (parts.capabilities.details["model_code"], parts.capabilities.is_batch_invariant) == ("transformers", False)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_paged_is_refused_before_its_weights_are_read(name, tmp_path):
    model_type, fields, reason = REFUSED[name]
    make_config_only(tmp_path, model_type, fields)
    with pytest.raises(UnsupportedArchitectureError, match=f"model_type '{model_type}' cannot be served: .*{reason}"):
        load_parts(tmp_path, CHECK)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Falcon", "none of its layers calls the attention"),
        ("Mamba-2", "none of its layers calls the attention"),
        ("gpt-oss", "passes 's_aux' to its attention, that is attention sinks"),
        ("LFM2", "other logits than in one piece"),
    ],
)
def test_a_model_that_is_not_recognised_is_refused_by_what_it_does(name, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(transformers_model, "refuse_config", lambda _: None)
    monkeypatch.setattr(transformers_model, "refuse_class", lambda _: None)
    model_type, fields, _ = REFUSED[name]
    make_tiny_decoder(tmp_path, model_type, fields)
    with pytest.raises(UnsupportedArchitectureError, match=reason):
        load_parts(tmp_path, CHECK)


@pytest.mark.parametrize(
    ("window", "context_length", "lengths"),
    [(None, 256, [41, 24]), (100, 256, [108, 24]), (4096, 256, [41, 24]), (100, 64, [64, 24]), (None, 20, [20, 20])],
)
def test_the_check_at_load_reaches_beyond_a_short_window(window, context_length, lengths):
    probe = Probe.make(PretrainedConfig(vocab_size=9, sliding_window=window), context_length)
    assert [len(sequence) for sequence in probe.sequences] == lengths
    assert all(0 <= token_id < 9 for sequence in probe.sequences for token_id in sequence.tolist())


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("bert", "attends to what comes later"), ("diffllama", "has the number 0, which is none or not its own")],
)
def test_a_model_whose_layers_attend_otherwise_is_refused(model_type, reason, tmp_path):
    """To both sides, and twice in each layer."""
    make_tiny_decoder(tmp_path, model_type, SERVED["Phi-3"][1] | {"sliding_window": None})
    with pytest.raises(UnsupportedArchitectureError, match=reason):
        load_parts(tmp_path, CHECK)


class AllRows(torch.nn.Module):
    """Model code that does not know `logits_to_keep`."""

    config = PretrainedConfig(vocab_size=9)
    dtype = torch.float32

    def forward(self, input_ids, **_):
        return CausalLMOutput(logits=torch.eye(9)[input_ids])


@pytest.mark.parametrize("rows", [[2], [0, 3], [], [0, 1, 2, 3]])
def test_only_the_wanted_rows_are_given_by_code_that_gives_all(rows):
    token_ids, wanted = torch.tensor([5, 6, 7, 8]), torch.tensor(rows, dtype=torch.int64)
    model = TransformersModel(AllRows(), ())
    logits = model.logits(model.forward(token_ids, torch.arange(4), lambda *_: None, wanted))
    assert logits.shape == (len(rows), 9)
    assert logits.argmax(1).tolist() == token_ids[wanted].tolist()


@pytest.mark.parametrize("field", ["window", "scale", "softcap"])
def test_the_check_at_load_sees_what_is_ignored(field, made, monkeypatch):
    """Planted faults: attention that does not hear of a layer's window, scale or softcap."""
    observe = Observer._observe

    def forgetful(*arguments):
        layer = observe(*arguments)
        return dataclasses.replace(layer, geometry=dataclasses.replace(layer.geometry, **{field: None}))

    monkeypatch.setattr(Observer, "_observe", forgetful)
    monkeypatch.setattr(transformers_model, "refuse_windows", lambda *_: None)
    with pytest.raises(UnsupportedArchitectureError, match="rows have other logits than in one piece"):
        load_parts(made("Gemma 2"), CHECK)


def test_a_window_that_no_layer_tells_is_refused(made, monkeypatch):
    """The check cannot see a window that is longer than what it runs."""
    observe = Observer._observe

    def forgetful(*arguments):
        layer = observe(*arguments)
        return dataclasses.replace(layer, geometry=dataclasses.replace(layer.geometry, window=None))

    monkeypatch.setattr(Observer, "_observe", forgetful)
    for name in ("Gemma 2", "Phi-3"):
        with pytest.raises(UnsupportedArchitectureError, match=r"sliding_window: 1[13], but a layer does not"):
            load_parts(made(name), CHECK)


@pytest.mark.parametrize("name", ["GPT-2", "Gemma 2"])
def test_an_int8_form_is_rounded_at_load_and_nearly_the_same(name, made, tmp_path):
    quantize_directory(made(name), tmp_path, name="rounded")
    prompt, block_size = [PROMPTS["long"]], CHECK.block_size
    parts = [load_parts(directory, CHECK) for directory in (made(name), tmp_path, tmp_path)]
    assert [each.capabilities.precision for each in parts] == ["fp32", "int8", "int8"]
    exact, rounded, again = (packed_logits(each.runner, prompt, block_size=block_size, chunks=(9, 1)) for each in parts)
    largest = max(float(row.abs().max()) for row in exact.values())
    errors = [float((row - rounded[place]).abs().max()) / largest for place, row in exact.items()]
    assert 1e-5 < max(errors) < 0.1
    assert all(torch.equal(row, again[place]) for place, row in rounded.items())


def test_what_is_refused_has_no_int8_form_either(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    make_config_only(source, *REFUSED["Falcon"][:2])
    with pytest.raises(UnsupportedArchitectureError, match="attention interface"):
        quantize_directory(source, target, name="rounded")
    assert not list(target.iterdir())


def test_every_product_is_packed(made):
    """The head, which is tied to the embedding, and both kinds of linear included."""
    module = load_parts(made("GPT-2"), CHECK).runner._model._module
    packed = [each for each in module.modules() if isinstance(each, PackedLinear)]
    assert len(packed) == 2 * 4 + 1
    assert {each.linear.name for each in packed} <= {"fp32", "onednn", "plain"}
    assert not [each for each in module.modules() if type(each).__name__ in ("Linear", "Conv1D")]


def test_weights_that_do_not_fit_are_refused_by_name(made, tmp_path):
    source = made("StableLM")
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(source / "model.safetensors")
    taken = weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"missing tensors: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_parts(tmp_path, CHECK)
    weights |= {"model.layers.1.mlp.up_proj.weight": taken, "model.layers.1.mlp.extra": torch.zeros(3)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"unexpected tensors: model\.layers\.1\.mlp\.extra"):
        load_parts(tmp_path, CHECK)
    weights["model.layers.1.mlp.up_proj.weight"] = taken[:, 1:].contiguous()
    del weights["model.layers.1.mlp.extra"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        WeightsError, match=r"mismatched tensors: model\.layers\.1\.mlp\.up_proj\.weight of shape \[96, 63\] instead of"
    ):
        load_parts(tmp_path, CHECK)
    (tmp_path / "model.safetensors").unlink()
    torch.save(load_file(source / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="safetensors"):
        load_parts(tmp_path, CHECK)


def test_logits_that_are_not_finite_are_refused_as_such(made, tmp_path):
    """As of a model that overflows in 16 bits."""
    shutil.copytree(made("StableLM"), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"][3] = torch.inf
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedArchitectureError, match="its logits are not finite in float32"):
        load_parts(tmp_path, CHECK)


@pytest.mark.parametrize("value", ["x", {}, -1])
def test_a_config_that_is_wrong_is_refused_with_the_model_type(value, tmp_path):
    make_config_only(tmp_path, *SERVED["Mixtral"])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": value}))
    with pytest.raises(UnsupportedArchitectureError, match="'mixtral' cannot be served"):
        load_parts(tmp_path, CHECK)


def test_16_bits_are_served_too(made):
    settings = dataclasses.replace(CHECK, dtype="bfloat16")
    parts = load_parts(made("Gemma 2"), settings)
    assert parts.capabilities.precision == "bf16"
    results = run_to_end(make_engine(parts, settings), [make_spec("s", PROMPTS["long"], max_output_tokens=4)])
    assert results["s"].finish.output_tokens == 4


def test_an_architecture_that_transformers_does_not_know_is_refused(made, tmp_path):
    make_config_only(tmp_path, *SERVED["OPT"])
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"opt"', '"no-such-model"'))
    with pytest.raises(
        UnsupportedArchitectureError, match="'no-such-model' cannot be served: transformers does not read"
    ):
        load_parts(tmp_path, CHECK)


def test_code_that_comes_with_the_weights_is_never_run(tmp_path):
    """A model that needs it is refused; one that transformers knows is computed by the code there."""
    make_tiny_decoder(tmp_path, *SERVED["OPT"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "brought.Config", "AutoModelForCausalLM": "brought.Model"}
    has_run = tmp_path / "has-run"
    (tmp_path / "brought.py").write_text(
        f"""from pathlib import Path
from transformers import OPTConfig, OPTForCausalLM
Path({str(has_run)!r}).touch()
class Config(OPTConfig):
    model_type = "brought"
class Model(OPTForCausalLM):
    config_class = Config
"""
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_parts(tmp_path, CHECK).capabilities.details["model_code"] == "transformers"
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "brought"}))
    with pytest.raises(UnsupportedArchitectureError, match=r"'brought' cannot be served: .*custom code"):
        load_parts(tmp_path, CHECK)
    assert not has_run.exists()


def test_the_context_is_no_longer_than_the_models_positions(made, tmp_path):
    make_tiny_decoder(tmp_path, "gpt2", {**SERVED["GPT-2"][1], "n_positions": 48})
    dataclasses.replace(read_manifest(tmp_path), context_length=100).write(tmp_path)
    assert load_parts(tmp_path, CHECK).capabilities.context_length == 48
