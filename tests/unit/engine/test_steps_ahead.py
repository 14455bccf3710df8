"""Over an executor that launches, steps are planned ahead of what they draw, and nobody can tell from the output."""

import random

import pytest

from gpu_worker.engine.execution import DeviceLostError, Sampled
from gpu_worker.engine.sequence import UNKNOWN_TOKEN
from tests.support.counting_engine import IS_NAN, RAISES, CountingExecutor, make_engine
from tests.support.engine_runs import collect, make_spec, run_to_end


class Launching(CountingExecutor):
    """Hands drawn tokens on by itself, and computes a launch when it is collected. Penalties need the host."""

    def __init__(self):
        super().__init__(max_tokens_at_once=1000)
        self.drawn, self.waiting, self.events, self.is_lost = {}, [], [], False

    def can_launch(self, requests):
        return not any(request.sampling.has_penalties for request in requests)

    def launch(self, plan, requests):
        self.events.append("launch")
        assert len(self.waiting) < 2, "one at most is not collected"
        if self.is_lost:
            raise DeviceLostError("gone")
        if any(RAISES in planned.token_ids for planned in plan.sequences):
            raise RuntimeError("out of scratch memory")
        self.known.update(planned.sequence_id for planned in plan.sequences)
        # The stream's order: what the launch before draws is known when this one runs.
        known = [
            [self.drawn[planned.sequence_id] if token == UNKNOWN_TOKEN else token for token in planned.token_ids]
            for planned in plan.sequences
        ]
        results = [self._draw(ids) for ids, planned in zip(known, plan.sequences, strict=True) if planned.is_sampled]
        sampled = [planned.sequence_id for planned in plan.sequences if planned.is_sampled]
        assert [request.sequence_id for request in requests] == sampled
        self.drawn = {
            name: result.token_id if isinstance(result, Sampled) else IS_NAN
            for name, result in zip(sampled, results, strict=True)
        }
        launch = Launched(self, results)
        self.waiting.append(launch)
        return launch

    def run(self, plan, requests):
        assert not any(UNKNOWN_TOKEN in planned.token_ids for planned in plan.sequences)
        return super().run(plan, requests)


class Launched:
    def __init__(self, executor, results):
        self.executor, self.results = executor, results

    def collect(self):
        self.executor.events.append("collect")
        assert self.executor.waiting.pop(0) is self, "in order, once"
        return self.results


def make_ahead(**fields):
    return make_engine(executor=Launching(), **fields)


def random_specs(seed, num=14):
    rng = random.Random(seed)
    return [
        make_spec(
            f"s{number}",
            [rng.randrange(97, 110) for _ in range(rng.choice([1, 3, 8, 21]))],
            max_output_tokens=rng.choice([1, 2, 5, 17]),
            priority=rng.randrange(3),
            ignore_eos=False,
            stop=rng.choice([(), ("p",), ("mno",)]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.0, 0.0, 0.5]),
        )
        for number in range(num)
    ]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_blocks", [12, 64])
def test_outputs_are_those_of_steps_that_are_waited_for(seed, num_blocks):
    """With preemption, prefix sharing, stops in the middle and requests that have to wait for the host."""
    results = []
    for make in (make_engine, make_ahead):
        engine = make(num_blocks=num_blocks, max_running=6, context_length=48)
        found = {}
        specs = random_specs(seed)
        for number, spec in enumerate(specs):
            engine.add(spec)
            if number % 2:
                collect(found, engine.step())
                engine.check_integrity()
        _rest(engine, found)
        results.append({name: (found[name].text, found[name].finish.reason) for name in sorted(found)})
        assert engine.load_report().num_free_blocks == num_blocks
    assert results[0] == results[1]
    assert len(results[0]) == 14


def _rest(engine, found):
    for _ in range(1000):
        if not engine.has_work():
            return found
        collect(found, engine.step())
        engine.check_integrity()
    raise AssertionError("no end")


def test_the_next_step_is_launched_before_the_one_that_runs_is_waited_for():
    engine = make_ahead()
    results = run_to_end(engine, [make_spec("a", b"a", max_output_tokens=4)])
    assert results["a"].text == "bcde"
    # Four tokens are four steps: no fifth is launched, because the length is known.
    assert engine.executor.events == [
        "launch",
        "launch",
        "collect",
        "launch",
        "collect",
        "launch",
        "collect",
        "collect",
    ]


def test_what_was_launched_behind_a_stop_is_dropped():
    engine = make_ahead()
    results = run_to_end(engine, [make_spec("a", b"a", max_output_tokens=9, stop=("d",))])
    assert (results["a"].text, results["a"].finish.output_tokens) == ("bc", 2)
    assert run_to_end(engine, [make_spec("b", b"k", max_output_tokens=2)])["b"].text == "lm"


def test_an_aborted_sequence_ends_with_what_was_numbered_and_its_flight_is_dropped():
    engine = make_ahead()
    engine.add(make_spec("a", b"a", max_output_tokens=9))
    engine.add(make_spec("b", b"k", max_output_tokens=9))
    found = {}
    collect(found, engine.step())
    engine.abort("a")
    _rest(engine, found)
    assert (found["a"].text, found["a"].finish.reason) == ("b", "CANCELLED")
    assert found["b"].text == "lmnopqrst"


def test_a_launch_that_raises_is_run_in_parts_and_fails_only_the_sequence_that_causes_it():
    engine = make_ahead()
    specs = [make_spec(name, b"a", max_output_tokens=4) for name in ("x", "y")]
    results = run_to_end(engine, [*specs, make_spec("bad", bytes([97, RAISES]))], after_step=engine.check_integrity)
    assert [results[name].text for name in ("x", "y")] == ["bcde", "bcde"]
    assert results["bad"].finish.failure == "the step failed: RuntimeError: out of scratch memory"


def test_logits_that_are_not_finite_fail_their_sequence_a_step_later():
    engine = make_ahead()
    results = run_to_end(
        engine,
        [make_spec("bad", bytes([IS_NAN - 2])), make_spec("good", b"a", max_output_tokens=5)],
        after_step=engine.check_integrity,
    )
    assert results["bad"].text == chr(IS_NAN - 1) + chr(IS_NAN)
    assert results["bad"].finish.failure == "the model's logits are not finite"
    assert results["good"].text == "bcdef"


def test_a_lost_device_ends_the_engine():
    engine = make_ahead()
    engine.add(make_spec("a", b"a"))
    engine.executor.is_lost = True
    with pytest.raises(DeviceLostError):
        engine.step()


def test_untried_sequences_of_both_steps_in_the_air_are_noted():
    noted = []
    engine = make_ahead(note_untried=lambda ids: noted.append(sorted(ids)))
    engine.add(make_spec("a", b"a", max_output_tokens=3))
    engine.step()
    engine.add(make_spec("b", b"k", max_output_tokens=3))
    engine.step()
    assert noted[0] == ["a"]
    assert noted[1] == ["a"], "its first step is still in the air"
    assert noted[2] == ["b"]
