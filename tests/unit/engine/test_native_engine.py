"""The engine's own decisions, over an executor whose next token is always the last one plus one."""

import pytest

from gpu_worker.engine.port import RefusedSequenceError
from service_kit.sampling import FinishReason
from tests.support.counting_engine import make_engine
from tests.support.engine_runs import make_spec, run_to_end
from tests.support.tiny_models import VOCAB_SIZE, encode


def run_one(spec, **fields):
    return run_to_end(make_engine(**fields), [spec])[spec.sequence_id]


def test_an_output_ends_with_length_at_its_limit():
    result = run_one(make_spec("s", b"a", max_output_tokens=3))
    assert (result.text, result.finish.reason, result.finish.output_tokens) == ("bcd", FinishReason.LENGTH, 3)


def test_an_output_ends_before_an_end_token():
    result = run_one(make_spec("s", [252], ignore_eos=False))
    assert result.token_ids == (253, 254, 255, 256)
    assert (result.finish.reason, result.finish.output_tokens) == (FinishReason.STOP, 4)


def test_an_output_ends_before_a_stop_string():
    result = run_one(make_spec("s", b"a", stop=("ef",)))
    assert (result.text, result.finish.reason, result.finish.matched_stop) == ("bcd", FinishReason.STOP, "ef")
    assert result.finish.output_tokens == 3


def test_tokens_held_for_a_stop_string_come_with_the_length_limit():
    result = run_one(make_spec("s", b"a", max_output_tokens=4, stop=("ez",)))
    assert (result.text, result.finish.reason, result.finish.output_tokens) == ("bcde", FinishReason.LENGTH, 4)


def test_a_repeated_add_changes_nothing_during_and_after_the_run():
    engine = make_engine()
    spec = make_spec("s", b"a", max_output_tokens=3)
    engine.add(spec)
    engine.step()
    engine.add(spec)
    assert run_to_end(engine)["s"].text == "cd"
    engine.add(spec)
    assert not engine.has_work()


def test_an_abort_ends_with_what_was_held_and_frees_the_memory():
    engine = make_engine()
    engine.add(make_spec("s", b"a", stop=("bcz",)))
    engine.add(make_spec("other", b"m", max_output_tokens=4))
    engine.step()
    engine.step()
    engine.abort("s")
    engine.abort("s")
    outputs = {output.sequence_id: output for output in engine.step().outputs}
    assert outputs["s"].delta.text == "bc"
    assert (outputs["s"].finish.reason, outputs["s"].finish.output_tokens) == (FinishReason.CANCELLED, 2)
    engine.check_integrity()
    assert run_to_end(engine)["other"].finish.output_tokens == 4
    assert engine.load_report().num_free_blocks == 32


def test_a_waiting_sequence_can_be_aborted():
    engine = make_engine(max_running=1)
    engine.add(make_spec("running", b"a"))
    engine.add(make_spec("waiting", b"a"))
    engine.step()
    engine.abort("waiting")
    (finish,) = [output.finish for output in engine.step().outputs if output.sequence_id == "waiting"]
    assert finish.reason is FinishReason.CANCELLED
    assert (finish.timings.prefill_started, finish.timings.first_token) == (0, 0)
    assert engine.load_report().num_waiting == 0


def test_an_abort_of_an_unknown_or_finished_sequence_is_ignored():
    engine = make_engine()
    engine.abort("unknown")
    run_to_end(engine, [make_spec("s", b"a", max_output_tokens=1)])
    engine.abort("s")
    assert not engine.has_work()
    assert engine.step().outputs == ()


def test_a_resumed_output_that_was_complete_ends_at_once():
    engine = make_engine()
    results = run_to_end(
        engine,
        [
            make_spec("full", b"a", output=b"bcd", max_output_tokens=3),
            make_spec("stopped", b"a", output=b"bcd", stop=("d",)),
        ],
    )
    assert (results["full"].deltas, results["full"].finish.reason) == ([], FinishReason.LENGTH)
    assert (results["stopped"].finish.reason, results["stopped"].finish.matched_stop) == (FinishReason.STOP, "d")
    assert results["full"].finish.output_tokens == 3
    assert engine.load_report().step == 1


def test_an_abort_does_not_turn_a_complete_output_into_a_cancelled_one():
    engine = make_engine()
    engine.add(make_spec("full", b"a", output=b"bcd", max_output_tokens=3))
    engine.abort("full")
    assert [output.finish.reason for output in engine.step().outputs] == [FinishReason.LENGTH]


def test_logits_that_are_not_finite_fail_only_their_sequence():
    engine = make_engine()
    results = run_to_end(
        engine, [make_spec("good", b"a", max_output_tokens=4), make_spec("bad", b"12345?", temperature=1.0)]
    )
    assert results["good"].text == "bcde"
    assert results["bad"].finish.failure == "the model's logits are not finite"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (make_spec("s", b""), "the prompt has no tokens"),
        (make_spec("s", [VOCAB_SIZE]), f"token {VOCAB_SIZE} is outside the vocabulary of {VOCAB_SIZE}"),
        (make_spec("s", b"a", output=[-1]), "token -1 is outside"),
        (make_spec("s", b"a", logit_bias=((VOCAB_SIZE, 1.0),)), "is outside the vocabulary"),
        (make_spec("s", b"a", stop_token_ids=(VOCAB_SIZE,)), "is outside the vocabulary"),
        (make_spec("s", b"a", priority=3), "class 3 is not one of 3"),
        (make_spec("s", b"a" * 100, max_output_tokens=29), "129 tokens together, the context holds 128"),
    ],
)
def test_what_can_never_run_is_refused(spec, message):
    engine = make_engine()
    with pytest.raises(RefusedSequenceError, match=message):
        engine.add(spec)
    assert not engine.has_work()


def test_what_does_not_fit_the_memory_is_refused():
    engine = make_engine(num_blocks=4)
    with pytest.raises(RefusedSequenceError, match="needs 5 KV blocks"):
        engine.add(make_spec("s", b"a" * 10, max_output_tokens=10))
    assert not engine.has_work()


def test_timings_are_in_the_order_of_events():
    timings = run_one(make_spec("s", b"a" * 40, max_output_tokens=3)).finish.timings
    assert 0 < timings.added < timings.prefill_started < timings.first_token < timings.finished


def test_the_load_report_counts_sequences_blocks_and_waste():
    engine = make_engine(max_running=2)
    for name in "abc":
        engine.add(make_spec(name, encode(f"{name}bcde")))
    engine.step()
    report = engine.load_report()
    assert (report.num_running, report.num_waiting, report.largest_batch) == (2, 1, 2)
    assert (report.num_blocks, report.num_free_blocks) == (32, 28)
    assert report.kv_waste == pytest.approx(1 - 10 / 16)


def test_each_step_notes_before_it_computes_what_has_not_made_a_token_yet():
    noted = []
    engine = make_engine(
        token_budget=8, note_untried=lambda names: noted.append((list(names), set(engine.executor.known)))
    )
    engine.add(make_spec("short", b"a", max_output_tokens=3))
    engine.step()
    engine.add(make_spec("long", b"0123456789", max_output_tokens=1))
    run_to_end(engine)
    assert noted[:2] == [(["short"], set()), (["long"], {"short"})]
    assert [names for names, _ in noted[2:]] == [["long"], []][: len(noted) - 2]
