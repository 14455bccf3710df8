"""The native engine against transformers, token for token, however the work is cut and batched."""

import itertools
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from gpu_worker.engine.engine import NativeEngine
from gpu_worker.engine.loading import load_native_engine, load_parts, make_engine
from gpu_worker.engine.settings import EngineSettings
from service_kit.delta import extend_chain
from service_kit.sampling import FinishReason
from tests.support.engine_runs import make_spec, run_to_end
from tests.support.tiny_models import LLAMA3_ROPE, VOCAB_SIZE, encode, make_tiny_llama

CONTEXT_LENGTH = 192
NUM_OUTPUT = 40
PROMPTS = tuple(
    encode(text)
    for text in (
        "The quick brown fox jumps over the lazy dog and then sleeps in the sun until the evening comes.",
        "x",
        "Pack my box with five dozen liquor jugs",
        "0123456789 abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ, and again: 0123456789 abcdefghijklmnopqrs",
        "héllo wörld",
    )
)
VARIANTS = {
    "llama3 rope": {"rope": LLAMA3_ROPE},
    "multi-head": {"num_kv_heads": 4, "tied": True},
}


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory):
    @cache
    def make(variant: str) -> Path:
        directory = tmp_path_factory.mktemp("model")
        make_tiny_llama(directory, context_length=CONTEXT_LENGTH, **VARIANTS[variant])
        return directory

    return make


@pytest.fixture(scope="session")
def expected_outputs(model_directory):
    """Greedy outputs of transformers for PROMPTS."""

    @cache
    def generate(variant: str) -> tuple[tuple[int, ...], ...]:
        model = LlamaForCausalLM.from_pretrained(model_directory(variant), dtype=torch.float32)
        model.generation_config.eos_token_id = None
        outputs = []
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_OUTPUT
            )
            outputs.append(tuple(output[0, len(prompt) :].tolist()))
        return tuple(outputs)

    return generate


def load(directory: Path, **fields: object) -> NativeEngine:
    return load_native_engine(directory, settings=EngineSettings(threads=1, num_blocks=128, **fields))


def specs(**fields: object):
    return [
        make_spec(str(number), prompt, max_output_tokens=NUM_OUTPUT, **fields) for number, prompt in enumerate(PROMPTS)
    ]


def outputs_of(results):
    return tuple(results[str(number)].token_ids for number in range(len(PROMPTS)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_output_equals_that_of_transformers(variant, model_directory, expected_outputs):
    results = run_to_end(load(model_directory(variant)), specs())
    assert outputs_of(results) == expected_outputs(variant)
    assert len(set(results["0"].token_ids)) > 5, "a constant output would compare nothing"


def test_output_is_the_same_alone_and_in_a_batch(model_directory, expected_outputs):
    engine = load(model_directory("llama3 rope"))
    for spec, expected in zip(specs(), expected_outputs("llama3 rope"), strict=True):
        assert run_to_end(engine, [spec])[spec.sequence_id].token_ids == expected
    assert engine.load_report().largest_batch == 1


@pytest.mark.parametrize("token_budget", [2, 7, 33])
def test_output_is_the_same_in_prefill_chunks(token_budget, model_directory, expected_outputs):
    engine = load(
        model_directory("llama3 rope"), token_budget=token_budget, max_running=2, long_prefill_tokens=token_budget
    )
    assert outputs_of(run_to_end(engine, specs())) == expected_outputs("llama3 rope")


@pytest.mark.parametrize("block_size", [1, 5, 16, 32])
def test_output_is_the_same_for_any_block_size(block_size, model_directory, expected_outputs):
    directory = model_directory("llama3 rope")
    engine = load_native_engine(
        directory, settings=EngineSettings(threads=1, num_blocks=800 // block_size, block_size=block_size)
    )
    assert outputs_of(run_to_end(engine, specs())) == expected_outputs("llama3 rope")


@pytest.mark.parametrize("num_host_blocks", [0, 16, 200])
def test_output_is_the_same_with_a_cache_far_too_small(num_host_blocks, model_directory, expected_outputs):
    """Twice five prompts that need 188 blocks, in 49: by recompute, and through a small and a large host tier."""
    settings = EngineSettings(
        threads=1, num_blocks=49, num_host_blocks=num_host_blocks, block_size=4, token_budget=32, max_running=8
    )
    engine = load_native_engine(model_directory("llama3 rope"), settings=settings)
    twins = [replace(spec, sequence_id=f"twin {spec.sequence_id}", prefix_salt="other") for spec in specs()]
    results = run_to_end(engine, [*specs(), *twins], after_step=engine.check_integrity)
    assert outputs_of(results) == expected_outputs("llama3 rope")
    assert outputs_of({str(number): results[f"twin {number}"] for number in range(len(PROMPTS))}) == outputs_of(results)
    report = engine.load_report()
    assert report.num_preempted > 0
    assert report.num_computed_prompt_tokens > 2 * sum(map(len, PROMPTS)) or num_host_blocks == 200
    assert (report.num_blocks_from_host > 0) == (num_host_blocks > 0)


@pytest.mark.parametrize("num_done", [1, 2, 15, 16, 17, NUM_OUTPUT - 1])
def test_a_resumed_output_continues_at_the_next_token(num_done, model_directory, expected_outputs):
    expected = expected_outputs("llama3 rope")
    resumed = [
        make_spec(str(number), prompt, output=expected[number][:num_done], max_output_tokens=NUM_OUTPUT)
        for number, prompt in enumerate(PROMPTS)
    ]
    results = run_to_end(load(model_directory("llama3 rope")), resumed)
    assert outputs_of(results) == tuple(tokens[num_done:] for tokens in expected)
    for number, prompt in enumerate(PROMPTS):
        result = results[str(number)]
        assert result.deltas[0].first == num_done + 1
        assert result.deltas[-1].chain == extend_chain(0, expected[number])
        assert result.finish.reason is FinishReason.LENGTH
        assert (result.finish.prompt_tokens, result.finish.output_tokens) == (len(prompt), NUM_OUTPUT)


SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 11}


def test_a_seeded_output_is_the_same_alone_batched_preempted_and_resumed(model_directory):
    directory = model_directory("llama3 rope")
    alone = load(directory)
    expected = tuple(run_to_end(alone, [spec])[spec.sequence_id].token_ids for spec in specs(**SAMPLED))
    assert outputs_of(run_to_end(load(directory), specs(**SAMPLED))) == expected
    tight = EngineSettings(threads=1, num_blocks=49, block_size=4, token_budget=32, max_running=8)
    engine = load_native_engine(directory, settings=tight)
    assert outputs_of(run_to_end(engine, specs(**SAMPLED))) == expected
    assert engine.load_report().num_preempted > 0
    resumed = make_spec("resumed", PROMPTS[2], output=expected[2][:9], max_output_tokens=NUM_OUTPUT, **SAMPLED)
    assert run_to_end(load(directory), [resumed])["resumed"].token_ids == expected[2][9:]
    other_seed = make_spec("other", PROMPTS[2], max_output_tokens=NUM_OUTPUT, **{**SAMPLED, "seed": 12})
    assert run_to_end(load(directory), [other_seed])["other"].token_ids != expected[2]


def test_what_is_not_a_number_never_leaves_its_own_sequence(tmp_path, model_directory, expected_outputs):
    """A token whose embedding is NaN fails its own sequence, and neither neighbours nor later holders of its blocks."""
    expected = expected_outputs("llama3 rope")
    nan_token = next(
        token_id for token_id in range(VOCAB_SIZE) if not any(token_id in tokens for tokens in PROMPTS + expected)
    )
    directory = tmp_path / "model"
    shutil.copytree(model_directory("llama3 rope"), directory)
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][nan_token] = torch.nan
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    settings = EngineSettings(threads=1, num_blocks=26, block_size=8, token_budget=64, max_running=8)
    engine = load_native_engine(directory, settings=settings)
    poison = [make_spec(f"poison {number}", [nan_token] * 90, max_output_tokens=5) for number in range(3)]
    results = run_to_end(engine, [poison[0], specs()[1]])
    assert results["poison 0"].finish.failure == "the model's logits are not finite"
    assert results["1"].token_ids == expected[1]
    engine.add(poison[1])
    engine.step()  # only part of its prompt, then it is gone
    engine.abort(poison[1].sequence_id)
    later = run_to_end(engine, [make_spec(f"later {number}", prompt) for number, prompt in enumerate(PROMPTS)])
    for number in range(len(PROMPTS)):
        assert later[f"later {number}"].token_ids == expected[number][:20]


def test_a_row_that_is_not_a_number_fails_alone_among_sixteen(model_directory, monkeypatch):
    parts = load_parts(model_directory("multi-head"), EngineSettings(threads=1, num_blocks=128))
    sixteen = [
        make_spec(
            str(number), encode(f"{number} is a number of its own"), max_output_tokens=12, temperature=0.8, seed=3
        )
        for number in range(16)
    ]
    expected = run_to_end(make_engine(parts, EngineSettings(num_blocks=128)), sixteen)
    computed, steps = parts.runner.logits, itertools.count(1)

    def spoil(plan):
        logits = computed(plan).clone()
        if next(steps) == 6:
            logits[11, 77] = torch.nan
        return logits

    monkeypatch.setattr(parts.runner, "logits", spoil)
    results = run_to_end(make_engine(parts, EngineSettings(num_blocks=128)), sixteen)
    assert results["11"].finish.failure == "the model's logits are not finite"
    assert results["11"].token_ids == expected["11"].token_ids[:5]
    for number in set(range(16)) - {11}:
        assert results[str(number)].token_ids == expected[str(number)].token_ids


def test_all_memory_is_free_after_the_last_sequence(model_directory):
    engine = load(model_directory("multi-head"))
    run_to_end(engine, specs(), after_step=engine.check_integrity)
    report = engine.load_report()
    assert (report.num_free_blocks, report.kv_waste, report.num_running) == (report.num_blocks, 0.0, 0)
