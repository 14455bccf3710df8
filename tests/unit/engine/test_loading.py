import dataclasses
import json

import pytest

from gpu_worker.artifacts.weights import WeightsError
from gpu_worker.engine import loading
from gpu_worker.engine.loading import load_native_engine
from gpu_worker.engine.settings import EngineSettings, EngineStartError
from gpu_worker.kernels.library import load_cpu_kernels
from gpu_worker.models.transformers_refusals import UnsupportedArchitectureError
from service_kit.model_manifest import ModelFilesError, read_manifest
from tests.support.engine_runs import make_spec, run_to_end
from tests.support.tiny_models import make_tiny_llama, quantize_tiny, read_config


@pytest.fixture
def directory(tmp_path):
    make_tiny_llama(tmp_path, context_length=64)
    return tmp_path


def change_config(directory, **fields):
    (directory / "config.json").write_text(json.dumps({**read_config(directory), **fields}))


def test_capabilities_tell_what_is_served(directory):
    manifest = read_manifest(directory)
    engine = load_native_engine(directory, settings=EngineSettings(threads=1, num_blocks=10, max_running=3))
    capabilities = engine.capabilities()
    assert (capabilities.engine, capabilities.model, capabilities.precision) == ("native", "tiny-llama", "fp32")
    assert (capabilities.model_revision, capabilities.vocab_size) == (manifest.revision, manifest.vocab_size)
    assert (capabilities.context_length, capabilities.num_blocks, capabilities.max_running) == (64, 10, 3)
    attention = "cpu" if load_cpu_kernels() else "reference"
    assert capabilities.details == {
        "model_code": "native",
        "device": "cpu",
        "threads": "1",
        "attention": attention,
    }
    assert capabilities.kv_dtype == "float32"


def test_the_shorter_of_both_context_lengths_counts(directory):
    dataclasses.replace(read_manifest(directory), context_length=48).write(directory)
    engine = load_native_engine(directory, settings=EngineSettings(threads=1))
    assert engine.capabilities().context_length == 48


def test_by_default_there_are_no_more_blocks_than_a_full_batch_needs(directory):
    engine = load_native_engine(directory, settings=EngineSettings(threads=1, max_running=5))
    assert engine.capabilities().num_blocks == 5 * 4


def test_by_default_blocks_take_a_share_of_the_available_memory(directory, monkeypatch):
    block_bytes = 16 * 2 * 2 * 2 * 16 * 4  # slots, key and value, layers, heads, head size, bytes
    monkeypatch.setattr(loading, "available_memory_bytes", lambda: 25 * block_bytes)
    engine = load_native_engine(directory, settings=EngineSettings(threads=1, memory_share=0.5))
    assert engine.capabilities().num_blocks == 12


def test_an_engine_without_memory_for_one_full_sequence_does_not_start(directory, monkeypatch):
    message = "one sequence of 64 tokens needs 4 KV blocks, there is memory for"
    with pytest.raises(EngineStartError, match=f"{message} 3"):
        load_native_engine(directory, settings=EngineSettings(threads=1, num_blocks=3))
    monkeypatch.setattr(loading, "available_memory_bytes", lambda: 1000)
    with pytest.raises(EngineStartError, match=f"{message} 0"):
        load_native_engine(directory, settings=EngineSettings(threads=1))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"device": "no-such-device"}, "device 'no-such-device'"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"kv_dtype": "int4"}, "kv_dtype 'int4'"),
        ({"threads": 0}, "threads"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"memory_share": 1.5}, "memory_share"),
        ({"device_memory_share": 0.0}, "device_memory_share"),
        ({"max_running": 0}, "max_running"),
        ({"token_budget": 3, "max_running": 4}, "token_budget"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(fields, named, directory):
    with pytest.raises(EngineStartError, match=named):
        load_native_engine(directory, settings=EngineSettings(**fields))


def test_a_model_that_nobody_computes_is_refused(directory):
    change_config(directory, hidden_act="gelu", rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(UnsupportedArchitectureError, match="rope type 'dynamic'"):
        load_native_engine(directory, settings=EngineSettings(threads=1))


def test_int8_weights_are_computed_by_our_own_code_or_not_at_all(directory):
    quantized = quantize_tiny(directory)
    change_config(quantized, hidden_act="gelu")
    with pytest.raises(WeightsError, match=r"unexpected tensors: .*weight_scale"):
        load_native_engine(quantized, settings=EngineSettings(threads=1))


def test_weights_that_do_not_fit_the_config_are_refused(directory):
    change_config(directory, intermediate_size=97)
    with pytest.raises(WeightsError, match=r"model\.layers\.0\.mlp"):
        load_native_engine(directory, settings=EngineSettings(threads=1))


def test_a_manifest_of_another_vocabulary_is_refused(directory):
    dataclasses.replace(read_manifest(directory), vocab_size=300).write(directory)
    with pytest.raises(ModelFilesError, match="vocab_size 300"):
        load_native_engine(directory, settings=EngineSettings(threads=1))


def test_another_precision_runs_and_is_announced(directory):
    engine = load_native_engine(directory, settings=EngineSettings(threads=1, dtype="bfloat16"))
    assert engine.capabilities().precision == "bf16"
    assert run_to_end(engine, [make_spec("s", b"hello", max_output_tokens=5)])["s"].finish.output_tokens == 5


def test_a_context_shorter_than_a_block_is_served(tmp_path):
    make_tiny_llama(tmp_path, context_length=8)
    engine = load_native_engine(tmp_path, settings=EngineSettings(threads=1, num_blocks=4))
    assert len(run_to_end(engine, [make_spec("s", [1, 2, 3], max_output_tokens=5)])["s"].token_ids) == 5


def test_every_layer_of_a_step_tells_of_progress(directory):
    turns = []
    settings = EngineSettings(threads=1, num_blocks=10)
    engine = load_native_engine(directory, settings=settings, on_progress=lambda: turns.append(1))
    turns.clear()
    run_to_end(engine, [make_spec("s", [1, 2, 3], max_output_tokens=5)])
    assert len(turns) == 5 * 2, "steps times layers"
