"""Models of other families, in the whole engine over paged attention, against eager transformers.

The contract of each architecture: with a cache too small for all, so that sequences are cut, preempted and computed again,
and with one that resumes, every row of logits that a token is drawn from is that of one plain forward of its sequence.
"""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_outputs import CausalLMOutput

from gpu_worker.artifacts.quantize import quantize_directory
from gpu_worker.engine.loading import EngineParts, load_parts, make_engine
from gpu_worker.engine.settings import EngineSettings
from gpu_worker.models.transformers_linears import PackedLinear
from gpu_worker.models.transformers_model import TransformersModel
from service_kit.model_manifest import read_manifest
from tests.support.engine_runs import make_spec, run_to_end
from tests.support.teacher_forcing import packed_logits
from tests.support.tiny_decoders import SERVED, make_tiny_decoder
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
def test_packed_cut_preempted_and_resumed_logits_are_those_of_eager_transformers(name, made_decoder):
    parts = load_parts(made_decoder(name), TIGHT)
    sequences, ours = run_recorded(parts, TIGHT)
    eager = AutoModelForCausalLM.from_pretrained(
        made_decoder(name), dtype=torch.float32, attn_implementation="eager"
    ).eval()
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


@pytest.mark.parametrize("name", ["GPT-2", "Gemma 2"])
def test_an_int8_form_is_rounded_at_load_and_nearly_the_same(name, made_decoder, tmp_path):
    quantize_directory(made_decoder(name), tmp_path, name="rounded")
    prompt, block_size = [PROMPTS["long"]], CHECK.block_size
    parts = [load_parts(directory, CHECK) for directory in (made_decoder(name), tmp_path, tmp_path)]
    assert [each.capabilities.precision for each in parts] == ["fp32", "int8", "int8"]
    exact, rounded, again = (packed_logits(each.runner, prompt, block_size=block_size, chunks=(9, 1)) for each in parts)
    largest = max(float(row.abs().max()) for row in exact.values())
    errors = [float((row - rounded[place]).abs().max()) / largest for place, row in exact.items()]
    assert 1e-5 < max(errors) < 0.1
    assert all(torch.equal(row, again[place]) for place, row in rounded.items())


def test_every_product_is_packed(made_decoder):
    """The head, which is tied to the embedding, and both kinds of linear included."""
    module = load_parts(made_decoder("GPT-2"), CHECK).runner._model._module
    packed = [each for each in module.modules() if isinstance(each, PackedLinear)]
    assert len(packed) == 2 * 4 + 1
    assert {each.linear.name for each in packed} <= {"fp32", "onednn", "plain"}
    assert not [each for each in module.modules() if type(each).__name__ in ("Linear", "Conv1D")]


def test_16_bits_are_served_too(made_decoder):
    settings = dataclasses.replace(CHECK, dtype="bfloat16")
    parts = load_parts(made_decoder("Gemma 2"), settings)
    assert parts.capabilities.precision == "bf16"
    results = run_to_end(make_engine(parts, settings), [make_spec("s", PROMPTS["long"], max_output_tokens=4)])
    assert results["s"].finish.output_tokens == 4


def test_the_context_is_no_longer_than_the_models_positions(made_decoder, tmp_path):
    make_tiny_decoder(tmp_path, "gpt2", {**SERVED["GPT-2"][1], "n_positions": 48})
    dataclasses.replace(read_manifest(tmp_path), context_length=100).write(tmp_path)
    assert load_parts(tmp_path, CHECK).capabilities.context_length == 48
