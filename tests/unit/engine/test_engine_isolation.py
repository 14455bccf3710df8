"""What goes wrong in a step concerns the sequences that cause it, and nobody else."""

import pytest

from tests.support.counting_engine import RAISES, UNDRAWABLE, make_engine
from tests.support.engine_runs import collect, make_spec, run_to_end

FULL_BLOCKS = b"abcdefgh"


def specs(*names, prompt=b"a"):
    return [make_spec(name, prompt, max_output_tokens=4) for name in names]


@pytest.mark.parametrize("num_sequences", [1, 2, 8])
def test_a_step_that_raises_fails_only_the_sequence_that_causes_it(num_sequences):
    engine = make_engine()
    good = [f"good {number}" for number in range(num_sequences - 1)]
    bad = make_spec("bad", bytes([ord("x"), RAISES]), max_output_tokens=4)
    results = run_to_end(engine, [*specs(*good), bad], after_step=engine.check_integrity)
    assert [results[name].text for name in good] == ["bcde"] * len(good)
    finish = results["bad"].finish
    assert (finish.reason, finish.failure) == (None, "the step failed: RuntimeError: out of scratch memory")
    assert engine.load_report().num_failed == 1


def test_a_batch_too_large_for_memory_is_computed_in_parts_and_nobody_fails():
    engine = make_engine(max_tokens_at_once=3)
    names = [f"s{number}" for number in range(8)]
    results = run_to_end(engine, specs(*names), after_step=engine.check_integrity)
    assert [results[name].text for name in names] == ["bcde"] * len(names)
    assert engine.load_report().num_failed == 0


def test_what_alone_is_too_large_for_memory_fails_with_the_reason():
    engine = make_engine(max_tokens_at_once=3)
    results = run_to_end(engine, [*specs("good"), *specs("large", prompt=b"abcd")])
    assert results["good"].text == "bcde"
    assert results["large"].finish.failure == "the step failed: MemoryError: 4 tokens"


def test_failing_moves_fail_those_that_would_read_the_copies():
    engine = make_engine()
    run_to_end(engine, specs("first", prompt=FULL_BLOCKS))
    engine.executor.moves_fail = True
    for spec in specs("copies", prompt=FULL_BLOCKS) + specs("good"):
        engine.add(spec)
    results = {}
    collect(results, engine.step())
    assert results["copies"].finish.failure == "moving blocks failed: RuntimeError: the bus is broken"
    engine.executor.moves_fail = False
    engine.check_integrity()
    rest = run_to_end(engine, specs("later", prompt=FULL_BLOCKS))
    assert results["good"].text + rest["good"].text == "bcde"
    assert rest["later"].finish.cached_prompt_tokens == 0, "nothing of before is trusted"


def test_the_cache_of_a_failed_sequence_is_not_used_again():
    engine = make_engine()
    prompt = FULL_BLOCKS * 4 + bytes([RAISES])
    first, second = (run_to_end(engine, specs(name, prompt=prompt))[name].finish for name in ("first", "second"))
    assert first.failure == second.failure is not None
    assert (second.cached_prompt_tokens, engine.load_report().num_cached_blocks) == (0, 0)


def test_the_cache_of_a_sequence_that_nothing_can_be_drawn_for_is_kept():
    engine = make_engine()
    prompt = FULL_BLOCKS * 4 + bytes([UNDRAWABLE])
    first, second = (run_to_end(engine, specs(name, prompt=prompt))[name].finish for name in ("first", "second"))
    assert first.failure == second.failure == "nothing is left to draw"
    assert second.cached_prompt_tokens == 32


def test_tenants_share_no_cached_prefix():
    engine = make_engine()
    cached = {}
    for name, salt in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("b2", "b")):
        spec = make_spec(name, FULL_BLOCKS + b"x", max_output_tokens=2, prefix_salt=salt)
        cached[name] = run_to_end(engine, [spec])[name].finish.cached_prompt_tokens
    assert cached == {"a1": 0, "a2": 8, "b1": 0, "b2": 8}


def test_nothing_is_remembered_of_sequences_that_ended():
    engine = make_engine()
    engine.add(make_spec("aborted", b"a"))
    engine.step()
    engine.abort("aborted")
    run_to_end(engine, [*specs("done", "bad"), make_spec("raises", bytes([RAISES]))])
    assert engine.executor.known == set()
