"""Layers as one call each, and models on a machine without the compiled library."""

import pytest
import torch
from structlog.testing import capture_logs

from gpu_worker.engine.loading import load_parts, make_engine
from gpu_worker.engine.sequence import PlannedSequence, StepPlan
from gpu_worker.engine.settings import EngineSettings
from gpu_worker.kernels import build
from gpu_worker.kernels.library import load_cpu_kernels
from tests.support.engine_runs import make_spec, run_to_end
from tests.support.paged_attention import need_kernels
from tests.support.tiny_models import make_tiny_model, quantize_tiny

SETTINGS = EngineSettings(threads=1, num_blocks=64, block_size=8, speculation="off")
MODELS = {
    "biases": ("llama", {"attention_bias": True}),
    "norms of heads": ("qwen3", {"head_dim": 24, "num_key_value_heads": 1}),
    "layers that do not turn": ("smollm3", {"no_rope_layers": [1, 0]}),
}


def plan_of(*sizes: int) -> StepPlan:
    planned = [
        PlannedSequence(
            sequence_id=str(number),
            start=0,
            token_ids=tuple(range(size)),
            block_table=tuple(range(8 * number, 8 * number + 8)),
            is_sampled=True,
        )
        for number, size in enumerate(sizes)
    ]
    return StepPlan(sequences=tuple(planned))


@pytest.mark.parametrize("is_int8", [False, True], ids=["fp32", "int8"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_layer_as_one_call_has_the_bits_of_its_operations(kind, is_int8, tmp_path):
    need_kernels()
    model_type, fields = MODELS[kind]
    make_tiny_model(tmp_path / "tiny", model_type, **fields)
    directory = quantize_tiny(tmp_path / "tiny") if is_int8 else tmp_path / "tiny"
    reported = []
    parts = load_parts(directory, SETTINGS, on_progress=lambda: reported.append(1))
    model = parts.runner._model
    assert model.whole_layers is not None
    plan = plan_of(1, 7, 40)
    reported.clear()
    whole = parts.runner.logits(plan)
    assert len(reported) == len(model.layers), "a long step tells that it gets on"
    model.whole_layers = None
    assert torch.equal(whole, parts.runner.logits(plan))


@pytest.fixture
def without_library(tmp_path, monkeypatch):
    """A process whose package has no compiled library."""
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "missing.so")
    load_cpu_kernels.cache_clear()
    yield
    load_cpu_kernels.cache_clear()


def answer(directory) -> tuple[int, ...]:
    parts = load_parts(directory, SETTINGS)
    spec = make_spec("a", tuple(range(20)), max_output_tokens=12, temperature=0.0, ignore_eos=True)
    return run_to_end(make_engine(parts, SETTINGS), [spec])["a"].token_ids


def test_without_the_library_engines_answer_alike_and_say_what_they_do_without(tmp_path, request):
    need_kernels()
    make_tiny_model(tmp_path / "tiny", "llama")
    directories = [tmp_path / "tiny", quantize_tiny(tmp_path / "tiny")]
    fast = [answer(directory) for directory in directories]
    request.getfixturevalue("without_library")
    with capture_logs() as logs:
        slow = [answer(directory) for directory in directories]
    assert slow[0] == fast[0]
    assert len(slow[1]) == 12, "int8 weights are multiplied as the numbers that they stand for"
    reasons = {line["event"]: line["reason"] for line in logs if "reason" in line}
    assert "the CPU kernels are missing" in reasons["linear_not_ours"]
    assert "was not built" in reasons["cpu_kernels_unavailable"]
    assert "the CPU kernels are missing" in reasons["linear_not_int8"]
    assert [line["name"] for line in logs if line["event"] == "attention_backend"] == ["reference", "reference"]
