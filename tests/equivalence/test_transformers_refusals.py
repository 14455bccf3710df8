"""What the transformers path refuses when it loads: by name, by what a model does, by its files."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig

from gpu_worker.artifacts.quantize import quantize_directory
from gpu_worker.artifacts.weights import WeightsError
from gpu_worker.engine.loading import load_parts
from gpu_worker.engine.settings import EngineSettings
from gpu_worker.models import transformers_model
from gpu_worker.models.transformers_attention import Observer
from gpu_worker.models.transformers_check import Probe
from gpu_worker.models.transformers_refusals import UnsupportedArchitectureError
from tests.support.tiny_decoders import REFUSED, SERVED, make_config_only, make_tiny_decoder

CHECK = EngineSettings(threads=1, num_blocks=40, block_size=8)


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


@pytest.mark.parametrize("field", ["window", "scale", "softcap"])
def test_the_check_at_load_sees_what_is_ignored(field, made_decoder, monkeypatch):
    """Planted faults: attention that does not hear of a layer's window, scale or softcap."""
    observe = Observer._observe

    def forgetful(*arguments):
        layer = observe(*arguments)
        return dataclasses.replace(layer, geometry=dataclasses.replace(layer.geometry, **{field: None}))

    monkeypatch.setattr(Observer, "_observe", forgetful)
    monkeypatch.setattr(transformers_model, "refuse_windows", lambda *_: None)
    with pytest.raises(UnsupportedArchitectureError, match="rows have other logits than in one piece"):
        load_parts(made_decoder("Gemma 2"), CHECK)


def test_a_window_that_no_layer_tells_is_refused(made_decoder, monkeypatch):
    """The check cannot see a window that is longer than what it runs."""
    observe = Observer._observe

    def forgetful(*arguments):
        layer = observe(*arguments)
        return dataclasses.replace(layer, geometry=dataclasses.replace(layer.geometry, window=None))

    monkeypatch.setattr(Observer, "_observe", forgetful)
    for name in ("Gemma 2", "Phi-3"):
        with pytest.raises(UnsupportedArchitectureError, match=r"sliding_window: 1[13], but a layer does not"):
            load_parts(made_decoder(name), CHECK)


def test_what_is_refused_has_no_int8_form_either(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    make_config_only(source, *REFUSED["Falcon"][:2])
    with pytest.raises(UnsupportedArchitectureError, match="attention interface"):
        quantize_directory(source, target, name="rounded")
    assert not list(target.iterdir())


def test_weights_that_do_not_fit_are_refused_by_name(made_decoder, tmp_path):
    source = made_decoder("StableLM")
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


def test_logits_that_are_not_finite_are_refused_as_such(made_decoder, tmp_path):
    """As of a model that overflows in 16 bits."""
    shutil.copytree(made_decoder("StableLM"), tmp_path, dirs_exist_ok=True)
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


def test_an_architecture_that_transformers_does_not_know_is_refused(made_decoder, tmp_path):
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
