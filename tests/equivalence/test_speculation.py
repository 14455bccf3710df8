"""Proposed tokens change no output: the same tokens, text, log probabilities and ends, and the same bits of logits.

Schedules as in the test of batch invariance (batches, chunks, shared prefixes, preemption, host tier, resumption, threads,
neighbours), with tokens proposed for some sequences in some steps: right ones, wrong ones, by a model and by looking up.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.engine.loading import EngineParts, load_parts
from gpu_worker.engine.settings import EngineSettings, EngineStartError
from gpu_worker.speculation.draft_model import DraftModelProposer
from gpu_worker.speculation.loading import load_speculation
from gpu_worker.speculation.ngram import NgramProposer
from gpu_worker.speculation.row_cost import RowCost
from gpu_worker.speculation.settings import SpeculationSettings
from service_kit.sampling import FinishReason
from tests.equivalence.test_batch_invariance import INT8, NUM_OUTPUT, PROMPTS, Model, Seen, differences, load_model
from tests.support.engine_runs import Result, make_spec, run_to_end
from tests.support.speculation import AlwaysSpeculating, Oracle
from tests.support.tiny_models import encode, make_tiny_llama, make_tiny_model

NUM_SCHEDULES = 5


@cache
def load_draft(seed: int) -> EngineParts:
    """With seed 0 the model that is also the target "llama", with others one that knows nothing of it."""
    with TemporaryDirectory() as root:
        directory = Path(root) / "draft"
        make_tiny_model(directory, "llama", context_length=160, seed=seed)
        return load_parts(directory, EngineSettings(threads=1, num_blocks=60, block_size=8, speculation="off"))


def proposed_by_model(seed: int, *, num_blocks: int = 60) -> DraftModelProposer:
    return DraftModelProposer(
        load_draft(seed).runner,
        pool=BlockPool(num_blocks=num_blocks, block_size=8),
        context_length=160,
        cost=RowCost([(1, 0.001)]),
    )


def known_output(model: Model) -> Oracle:
    """Proposes what the plain runs gave, neighbours excepted."""

    def next_tokens(sequence):
        if not sequence.sequence_id[0].isdigit():
            return ()
        number = int(sequence.sequence_id.split("#")[0])
        return model.plain_tokens[number][sequence.num_tokens - len(PROMPTS[number]) :]

    return Oracle(next_tokens, seed=1)


PROPOSERS = {
    "known": known_output,
    "looked up": lambda _: NgramProposer(),
    "same model": lambda _: proposed_by_model(0),
    "other model, little memory": lambda _: proposed_by_model(1, num_blocks=24),
}


@pytest.mark.parametrize(
    ("proposer", "model_type"),
    [("known", "llama"), ("known", INT8), ("same model", "llama"), ("other model, little memory", "llama")],
)
def test_every_schedule_gives_the_same_bits_with_proposed_tokens(proposer, model_type):
    model = load_model(model_type)
    speculation = AlwaysSpeculating(make_proposer=lambda: PROPOSERS[proposer](model), seed=7)
    speculating = replace(model, parts=replace(model.parts, speculation=speculation))
    seen = Seen()
    found = list(differences(speculating, range(NUM_SCHEDULES), seen))
    assert not found
    assert seen.num_compared > NUM_SCHEDULES * NUM_OUTPUT
    assert min(seen.num_resumed, seen.num_preempted, seen.num_cached_tokens, seen.num_blocks_from_host) > 0, seen
    num_proposed = sum(drafts.counts.num_proposed for drafts in speculation.made)
    num_accepted = sum(drafts.counts.num_accepted for drafts in speculation.made)
    assert num_proposed > 0
    match proposer:
        case "known":
            assert 0 < num_accepted < num_proposed
        case "same model":
            # Drawn with the same numbers from the same distribution.
            assert num_accepted == num_proposed
        case _:
            assert num_accepted < num_proposed
    for drafts in speculation.made:
        if isinstance(drafts.proposer, DraftModelProposer):
            drafts.proposer.check_integrity()
            assert len(drafts.proposer._contexts) == 0, "what ended is forgotten"


def full_results(results: dict[str, Result]) -> dict[str, tuple[object, ...]]:
    """All that a client could tell apart, but not in which steps it came."""
    return {
        name: (
            result.token_ids,
            tuple(text for delta in result.deltas for text in delta.texts),
            tuple(logprob for delta in result.deltas for logprob in delta.logprobs),
            result.deltas[-1].chain if result.deltas else None,
            replace(result.finish, timings=None, cached_prompt_tokens=0),
        )
        for name, result in results.items()
    }


def requests(model: Model) -> dict[str, dict[str, object]]:
    """Every way to draw and to end, with stop strings out of the middle of the plain outputs."""
    seeded = {"temperature": 1.0, "seed": 11}
    plain = run_to_end(model.engine(), [make_spec("p", PROMPTS[3], max_output_tokens=30, **seeded)])["p"]
    middle = "".join(text for delta in plain.deltas for text in delta.texts)[8:10]
    return {
        "stopped": {"stop": (middle,), **seeded},
        "stopped behind": {"stop": (middle,), "include_stop": True, **seeded},
        "stopped late": {"stop": (middle[0],), "min_output_tokens": 20, **seeded},
        "ended": {"stop_token_ids": (plain.token_ids[12],), "logprobs": 3, **seeded},
        "kept from ending": {"stop_token_ids": tuple(range(0, 256, 4)), "min_output_tokens": 17, **seeded},
        "held": {"stop": (middle + " and nothing",), "logprobs": 0, **seeded},
        "penalised": {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.4, "logprobs": 2},
        "penalised and drawn": {"repetition_penalty": 1.2, "frequency_penalty": 0.7, "top_k": 40, **seeded},
        "biased": {"logit_bias": ((65, 4.0), (66, 3.5), (67, -50.0)), "logprobs": 1},
        "narrow": {"top_k": 5, "top_p": 0.8, "min_p": 0.05, **seeded},
        "repetitive": {"logit_bias": tuple((token_id, 60.0) for token_id in b"ab"), "logprobs": 1, **seeded},
        "greedy": {"logprobs": 4},
        "short": {"max_output_tokens": 1},
    }


@pytest.mark.parametrize("proposer", ["known", "looked up", "same model"])
def test_every_way_to_draw_and_to_end_is_the_same_with_proposed_tokens(proposer):
    model = load_model("llama")
    specs = [
        make_spec(name, PROMPTS[3], **{"max_output_tokens": 30, **sampling})
        for name, sampling in requests(model).items()
    ]
    plain = full_results(run_to_end(model.engine(), specs))
    reasons = {finish.reason for *_, finish in plain.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    proposers = {
        **PROPOSERS,
        "known": lambda _: Oracle(
            lambda sequence: plain[sequence.sequence_id][0][sequence.num_tokens - len(PROMPTS[3]) :], seed=2
        ),
    }
    speculation = AlwaysSpeculating(make_proposer=lambda: proposers[proposer](model))
    engine = replace(model, parts=replace(model.parts, speculation=speculation)).engine()
    assert full_results(run_to_end(engine, specs, after_step=engine.check_integrity)) == plain
    load = engine.load_report()
    assert 0 < load.num_accepted_draft_tokens < load.num_draft_tokens
    assert load.num_draft_steps > 0


def test_an_engine_speculates_by_itself_and_gives_the_same_output(tmp_path):
    make_tiny_llama(tmp_path / "model", context_length=512)
    settings = EngineSettings(threads=1, num_blocks=80)
    parts = load_parts(tmp_path / "model", settings)
    model = Model(parts=parts, settings=settings, recorded={}, plain_logits={}, plain_tokens={})
    # A bias that leaves few tokens makes an output that repeats itself.
    bias = tuple((token_id, 60.0) for token_id in encode("ab"))
    specs = [make_spec("s", encode("abababab"), max_output_tokens=200, logit_bias=bias)]
    speculating = model.engine()
    results = full_results(run_to_end(speculating, specs))
    plain = replace(model, parts=replace(parts, speculation=None)).engine()
    assert results == full_results(run_to_end(plain, specs))
    assert plain.load_report().num_draft_tokens == 0


def test_a_draft_model_of_the_engine_is_used(tmp_path):
    make_tiny_llama(tmp_path / "model", context_length=160)
    settings = EngineSettings(threads=1, num_blocks=80, draft_model=str(tmp_path / "model"))
    parts = load_parts(tmp_path / "model", settings)
    speculation = AlwaysSpeculating(make_proposer=parts.speculation._proposer)
    model = Model(
        parts=replace(parts, speculation=speculation), settings=settings, recorded={}, plain_logits={}, plain_tokens={}
    )
    engine = model.engine()
    run_to_end(engine, [make_spec("s", encode("a text"), max_output_tokens=40, temperature=1.0, seed=3)])
    load = engine.load_report()
    # The same model, drawn with the same numbers: everything is right.
    assert load.num_accepted_draft_tokens == load.num_draft_tokens > 20


def test_a_draft_model_without_memory_is_refused_by_its_setting(tmp_path):
    make_tiny_llama(tmp_path / "model", context_length=64)
    settings = EngineSettings(threads=1, num_blocks=8, draft_model=str(tmp_path / "model"), draft_memory_share=1e-12)
    with pytest.raises(EngineStartError, match="draft_model: one sequence of 64 tokens needs 4 KV blocks"):
        load_parts(tmp_path / "model", settings)


def test_a_draft_model_with_another_vocabulary_is_refused(tmp_path):
    make_tiny_llama(tmp_path / "model", context_length=64)
    make_tiny_llama(tmp_path / "draft", context_length=64, vocab_size=300)
    settings = EngineSettings(threads=1, num_blocks=8, draft_model=str(tmp_path / "draft"))
    with pytest.raises(EngineStartError, match="draft_model: tiny-llama has a vocabulary of 300"):
        load_parts(tmp_path / "model", settings)


def test_a_draft_model_with_a_token_that_is_another_one_is_refused(tmp_path):
    for name in ("model", "draft"):
        make_tiny_llama(tmp_path / name, context_length=64)
    path = tmp_path / "draft" / "tokenizer.json"
    document = json.loads(path.read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["x"], vocabulary["y"] = vocabulary["y"], vocabulary["x"]
    path.write_text(json.dumps(document))
    settings = EngineSettings(threads=1, num_blocks=8, draft_model=str(tmp_path / "draft"))
    with pytest.raises(EngineStartError, match=f"draft_model: token {ord('x')} of tiny-llama is another one"):
        load_parts(tmp_path / "model", settings)


@pytest.mark.parametrize(
    ("mode", "is_batch_invariant", "speculates"),
    [("auto", True, True), ("auto", False, False), ("ngram", False, True), ("off", True, False)],
)
def test_speculation_has_to_be_asked_for_where_logits_depend_on_the_batch(mode, is_batch_invariant, speculates):
    parts = load_draft(0)
    speculation = load_speculation(
        SpeculationSettings(mode=mode),
        executor=parts.runner,
        capabilities=replace(parts.capabilities, is_batch_invariant=is_batch_invariant),
        table=parts.table,
        load_draft=lambda: pytest.fail("there is none"),
    )
    assert (speculation is not None) == speculates
