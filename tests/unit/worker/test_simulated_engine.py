import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.artifacts.simulated_model import EOS_TOKEN_ID
from gpu_worker.engine.port import RefusedSequenceError, SequenceSpec
from gpu_worker.engine.simulated import SimulatedWorld, load_simulated_engine
from gpu_worker.engine.simulated_plan import SimulatedBatch, SimulatedSequence
from gpu_worker.engine.simulated_settings import InvalidSettingsError, SimulatedSettings
from gpu_worker.engine.simulated_tokens import TokenMode, expected_output
from service_kit.delta import TokenLogprob, join
from service_kit.sampling import FinishReason, SamplingParams
from tests.support.tiny_models import encode
from tests.unit.worker.simulated_world import ProcessExitedError


def spec(
    sequence_id="a", prompt="hello", *, output=(), max_output_tokens=8, priority=0, nonce=7, prefix_salt="", **sampling
):
    return SequenceSpec(
        sequence_id=sequence_id,
        prompt_token_ids=encode(prompt),
        output_token_ids=tuple(output),
        sampling=SamplingParams(max_output_tokens=max_output_tokens, **sampling),
        priority=priority,
        nonce=nonce,
        prefix_salt=prefix_salt,
    )


def run(engine, *specs):
    """Deltas joined and the finish, by sequence."""
    for each in specs:
        engine.add(each)
    deltas, finishes = {}, {}
    for _ in range(2000):
        if not engine.has_work():
            return {key: (join(deltas.get(key, [])), finish) for key, finish in finishes.items()}
        for output in engine.step().outputs:
            assert output.delta is not None or output.finish is not None
            if output.delta is not None:
                deltas.setdefault(output.sequence_id, []).append(output.delta)
            if output.finish is not None:
                assert output.sequence_id not in finishes
                finishes[output.sequence_id] = output.finish
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("mode", [TokenMode.PROMPT_HASH, TokenMode.NONCE])
def test_an_output_is_what_the_oracle_expects(make_engine, mode):
    delta, finish = run(make_engine(token_mode=mode), spec(seed=3))["a"]
    nonce = 7 if mode is TokenMode.NONCE else 0
    expected = expected_output(prompt_token_ids=encode("hello"), prior_output=[], seed=3, nonce=nonce, count=8)
    assert list(delta.token_ids) == expected
    assert delta.text == bytes(expected).decode()
    assert (finish.reason, finish.output_tokens, finish.prompt_tokens) == (FinishReason.LENGTH, 8, 5)


def test_an_echo_says_the_prompt_again_and_again_and_continues_where_it_was(make_engine):
    delta, _ = run(make_engine(token_mode="echo"), spec())["a"]
    assert delta.text == "hellohel"
    rest, _ = run(make_engine(token_mode="echo"), spec(output=delta.token_ids[:3], nonce=8))["a"]
    assert rest.text == "lohel"


def test_a_resumed_attempt_continues_the_output_in_prompt_hash_mode_and_not_in_nonce_mode(make_engine):
    whole, _ = run(make_engine(), spec())["a"]
    rest, finish = run(make_engine(), spec(output=whole.token_ids[:3], nonce=8))["a"]
    assert (rest.first, rest.token_ids, rest.chain) == (4, whole.token_ids[3:], whole.chain)
    assert finish.output_tokens == 8
    noisy, _ = run(make_engine(token_mode="nonce"), spec(output=whole.token_ids[:3], nonce=8))["a"]
    other, _ = run(make_engine(token_mode="nonce"), spec(output=whole.token_ids[:3], nonce=9))["a"]
    assert noisy.token_ids != other.token_ids


def test_a_stop_string_ends_the_output_before_it(make_engine):
    whole, _ = run(make_engine(), spec())["a"]
    stop = whole.text[4:6]
    delta, finish = run(make_engine(), spec(stop=(stop,)))["a"]
    assert delta.text == whole.text[: whole.text.index(stop)]
    assert (finish.reason, finish.matched_stop) == (FinishReason.STOP, stop)


def test_eos_ends_the_output_unless_it_is_ignored(make_engine):
    delta, finish = run(make_engine(eos_one_in=1), spec())["a"]
    assert (delta, finish.reason, finish.output_tokens) == (None, FinishReason.STOP, 0)
    delta, finish = run(make_engine(eos_one_in=1), spec(ignore_eos=True))["a"]
    assert (set(delta.token_ids), delta.text, finish.reason) == ({EOS_TOKEN_ID}, "", FinishReason.LENGTH)


def test_no_output_ends_before_its_minimum(make_engine):
    delta, finish = run(make_engine(eos_one_in=1), spec(min_output_tokens=3))["a"]
    assert len(delta.text) == 3
    assert (finish.reason, finish.output_tokens) == (FinishReason.STOP, 3)


def test_an_included_stop_string_is_the_end_of_the_text(make_engine):
    whole, _ = run(make_engine(), spec())["a"]
    stop = whole.text[4:6]
    delta, finish = run(make_engine(), spec(stop=(stop,), include_stop=True))["a"]
    assert delta.text == whole.text[: whole.text.index(stop) + 2]
    assert finish.matched_stop == stop


@pytest.mark.parametrize(("num_top", "size"), [(None, None), (0, 0), (1, 1), (20, 1)])
def test_every_token_is_certain_when_log_probabilities_are_asked_for(make_engine, num_top, size):
    delta, _ = run(make_engine(), spec(logprobs=num_top, stop=("never",)))["a"]
    expected = [TokenLogprob(0.0, ((token_id, 0.0),)[:size]) for token_id in delta.token_ids]
    assert delta.logprobs == (() if num_top is None else tuple(expected))


def test_an_output_that_is_already_complete_ends_at_once(make_engine):
    delta, finish = run(make_engine(), spec(output=range(40, 48)))["a"]
    assert (delta, finish.reason, finish.output_tokens) == (None, FinishReason.LENGTH, 8)


def test_an_aborted_sequence_says_cancelled_with_the_next_step_and_leaves_nothing(make_engine):
    engine = make_engine()
    engine.add(spec("a"))
    engine.add(spec("b"))
    engine.step()
    engine.abort("a")
    engine.abort("unknown")
    by_id = {output.sequence_id: output for output in engine.step().outputs}
    assert by_id["a"].finish.reason is FinishReason.CANCELLED
    assert by_id["b"].finish is None
    engine.abort("b")
    engine.step()
    assert not engine.has_work()
    report = engine.load_report()
    assert (report.num_running, report.num_waiting, report.num_free_blocks) == (0, 0, report.num_blocks)


def test_a_repeated_id_changes_nothing(make_engine):
    engine = make_engine()
    engine.add(spec("a"))
    results = run(engine, spec("a"), spec("a", prompt="other"))
    assert results["a"][0].text == run(make_engine(), spec("a"))["a"][0].text


def test_the_batch_never_exceeds_max_running(make_engine):
    engine = make_engine(max_running=3)
    results = run(engine, *(spec(f"s{index}") for index in range(8)))
    assert len(results) == 8
    assert engine.load_report().largest_batch == 3


def test_lower_classes_wait_for_higher_ones(make_engine):
    engine = make_engine(max_running=1)
    for each in (spec("batch", priority=2), spec("interactive", priority=0)):
        engine.add(each)
    first = next(output.sequence_id for output in engine.step().outputs)
    assert first == "interactive"


def test_a_higher_class_takes_the_place_of_the_last_of_a_lower_one_in_a_full_batch(make_engine):
    engine = make_engine(max_running=2)
    for each in (spec("old", priority=2), spec("new", priority=2)):
        engine.add(each)
    engine.step()
    engine.add(spec("urgent", priority=0))
    assert [output.sequence_id for output in engine.step().outputs] == ["urgent", "old"]
    report = engine.load_report()
    assert (report.num_preempted, report.num_waiting, report.largest_batch) == (1, 1, 2)
    assert set(run(engine)) == {"old", "new", "urgent"}


def test_nobody_takes_the_place_of_an_equal_in_a_full_batch(make_engine):
    engine = make_engine(max_running=1)
    engine.add(spec("first", priority=1))
    engine.step()
    engine.add(spec("second", priority=1))
    assert [output.sequence_id for output in engine.step().outputs] == ["first"]
    assert engine.load_report().num_preempted == 0


def test_out_of_blocks_the_last_arrival_is_preempted_and_says_the_same_in_the_end(make_engine):
    alone = {
        f"s{index}": run(make_engine(), spec(f"s{index}", f"prompt {index}", max_output_tokens=40))
        for index in (0, 1, 2)
    }
    engine = make_engine(num_blocks=12, block_size=8)
    together = run(engine, *(spec(f"s{index}", f"prompt {index}", max_output_tokens=40) for index in (0, 1, 2)))
    assert {key: value[0] for key, value in together.items()} == {key: value[key][0] for key, value in alone.items()}
    report = engine.load_report()
    assert report.num_preempted > 0
    assert report.num_free_blocks == 12


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode(make_engine):
    engine = make_engine(step_tokens=8, max_running=8)
    engine.add(spec("short", "hi"))
    engine.step()
    engine.add(spec("long", "x" * 40))
    steps = [{output.sequence_id for output in engine.step().outputs} for _ in range(6)]
    assert all("short" in ids for ids in steps)
    assert ["long" in ids for ids in steps] == [False] * 5 + [True]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (spec(prompt=""), "empty"),
        (spec(max_output_tokens=252), "context"),
        (spec(output=[258]), "vocabulary"),
        (spec(prompt="<<fault:nonsense>>"), "nonsense"),
        (spec(prompt="<<fault:slow>>"), "slow"),
    ],
)
def test_what_can_never_run_is_refused_with_the_reason(make_engine, wrong, named):
    with pytest.raises(RefusedSequenceError, match=named):
        make_engine(has_prompt_faults=True).add(wrong)


def test_what_never_fits_the_memory_is_refused(make_engine):
    with pytest.raises(RefusedSequenceError, match="blocks"):
        make_engine(num_blocks=2, block_size=4).add(spec())


@pytest.mark.parametrize("wrong", [{"num_blocks": 0}, {"tokens_per_s": -1}, {"step_tokens": 3}, {"token_mode": "x"}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=r"num_blocks|tokens_per_s|step_tokens|x"):
        SimulatedSettings(**wrong)
    assert issubclass(InvalidSettingsError, ValueError)


def test_steps_take_the_time_that_the_rates_say(make_engine, world):
    _, finish = run(make_engine(tokens_per_s=10, prefill_tokens_per_s=50), spec(max_output_tokens=4))["a"]
    assert world.slept == pytest.approx([0.2, 0.1, 0.1, 0.1])
    times = finish.timings
    assert (times.added, times.prefill_started) == (1000.0, 1000.0)
    assert (times.first_token, times.finished) == pytest.approx((1000.2, 1000.5))


def test_a_crash_marker_exits_when_the_sequence_first_runs(make_engine):
    engine = make_engine(has_prompt_faults=True)
    engine.add(spec(prompt="say <<fault:crash>> now"))
    with pytest.raises(ProcessExitedError):
        engine.step()


def test_the_suspects_of_a_crash_are_noted_before_it(directory, world):
    noted = []
    engine = load_simulated_engine(
        directory,
        settings=SimulatedSettings(has_prompt_faults=True),
        world=SimulatedWorld(clock=lambda: world.now, sleep=world.sleep, exit_process=world.exit),
        note_untried=noted.append,
    )
    engine.add(spec("neighbour"))
    engine.step()
    engine.add(spec("poison", prompt="<<fault:crash>>"))
    with pytest.raises(ProcessExitedError):
        engine.step()
    assert noted == [["neighbour"], ["poison"]]


def test_markers_are_plain_text_unless_they_are_switched_on(make_engine):
    assert run(make_engine(), spec(prompt="<<fault:crash>>"))["a"][1].reason is FinishReason.LENGTH


@pytest.mark.parametrize(("name", "crashes_resumed"), [("crash-after", True), ("crash-once-after", False)])
def test_a_crash_after_n_tokens_comes_when_they_are_out(make_engine, name, crashes_resumed):
    prompt = f"<<fault:{name}=2>>"
    engine = make_engine(has_prompt_faults=True)
    engine.add(spec(prompt=prompt))
    assert sum(len(output.delta.token_ids) for _ in range(2) for output in engine.step().outputs) == 2
    with pytest.raises(ProcessExitedError):
        engine.step()
    resumed = make_engine(has_prompt_faults=True)
    if crashes_resumed:
        with pytest.raises(ProcessExitedError):
            run(resumed, spec(prompt=prompt, output=encode("xy")))
    else:
        assert run(resumed, spec(prompt=prompt, output=encode("xy")))["a"][1].output_tokens == 8


def test_a_hang_marker_makes_no_progress(make_engine):
    engine = make_engine(has_prompt_faults=True)
    engine.add(spec(prompt="<<fault:hang>>"))
    with pytest.raises(TimeoutError):
        engine.step()


def test_a_slow_marker_makes_its_steps_longer(make_engine, world):
    run(make_engine(has_prompt_faults=True), spec(prompt="<<fault:slow=0.5>>", max_output_tokens=2))
    assert world.slept == [0.5, 0.5]


@given(
    lengths=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=8),
    block_size=st.integers(1, 5),
    max_running=st.integers(1, 4),
)
def test_blocks_are_conserved_and_every_sequence_gets_to_its_end(lengths, block_size, max_running):
    num_blocks = max(-(-(prompt + count) // block_size) for _, prompt, count in lengths)
    batch = SimulatedBatch(num_blocks=num_blocks, block_size=block_size, max_running=max_running)
    ends = {}
    slots = []
    for index, (priority, prompt, count) in enumerate(lengths):
        slots.append(SimulatedSequence(sequence_id=str(index), rank=(priority, index), num_tokens=prompt))
        ends[str(index)] = prompt + count
        batch.add(slots[-1])
    for _ in range(2000):
        plan = batch.plan(8)
        live = [slot for slot in slots if slot.sequence_id in ends]
        assert batch.num_free_blocks + sum(slot.num_blocks for slot in live) == num_blocks
        assert batch.num_free_blocks >= 0
        assert batch.num_running <= max_running
        assert 0 < sum(chunk for _, chunk in plan) <= 8
        for slot, chunk in plan:
            assert slot.num_computed + chunk <= slot.num_blocks * block_size
            if batch.advance(slot, chunk) and slot.num_tokens == ends[slot.sequence_id]:
                batch.remove(slot)
                del ends[slot.sequence_id]
        if not ends:
            assert batch.num_free_blocks == num_blocks
            return
    raise AssertionError("no progress")
