"""Which drawn tokens count, and what becomes of the rest, through an engine whose next token is always one more."""

import pytest

from gpu_worker.engine.execution import NOT_FINITE, Sampled, SampleFailure
from gpu_worker.engine.penalties import TokenCounts
from gpu_worker.speculation.verification import accept
from service_kit.sampling import FinishReason
from tests.support.counting_engine import IS_NAN, RAISES, CountingExecutor, make_engine
from tests.support.engine_runs import make_spec, run_to_end
from tests.support.speculation import EagerDrafts, Oracle


class Verifying(CountingExecutor):
    """Draws behind every proposed token too."""

    def run(self, plan, requests):
        assert len(requests) == sum(planned.num_sampled_rows for planned in plan.sequences)
        if any(planned.num_drafts and RAISES in planned.token_ids for planned in plan.sequences):
            raise RuntimeError("out of scratch memory")
        outcomes = []
        for planned in plan.sequences:
            known = len(planned.token_ids) - planned.num_drafts
            outcomes += [self._draw(planned.token_ids[: known + row]) for row in range(planned.num_sampled_rows)]
        for request, outcome in zip(requests, outcomes, strict=True):
            if isinstance(outcome, Sampled):
                last = (*request.token_ids, *request.draft_token_ids)[-1]
                assert outcome.token_id == last + 1
                num_output = len(request.token_ids) - request.num_prompt_tokens + len(request.draft_token_ids)
                assert request.position == num_output + 1
        return outcomes


class Certain(Oracle):
    """What follows is always one more."""

    def __init__(self, count=5):
        super().__init__(lambda sequence: [sequence.token_ids[-1] + n for n in range(1, count + 1)], seed=0)
        self._random.random = lambda: 0.0


def engine_with(proposer, **fields):
    executor = Verifying(max_tokens_at_once=1000)
    return make_engine(executor=executor, drafts=EagerDrafts(proposer, seed=1), **fields)


def sampled(*token_ids):
    return [Sampled(token_id=token_id) for token_id in token_ids]


def test_tokens_count_up_to_the_first_that_was_proposed_wrongly():
    assert accept((1, 2, 3), sampled(1, 2, 3, 4)) == tuple(sampled(1, 2, 3, 4))
    assert accept((1, 2, 3), sampled(1, 5, 3, 4)) == tuple(sampled(1, 5))
    assert accept((1,), sampled(2, 2)) == tuple(sampled(2))
    assert accept((), sampled(9)) == tuple(sampled(9))


def test_a_failure_counts_only_before_the_first_proposed_token():
    failure = SampleFailure(reason=NOT_FINITE)
    assert accept((1, 2), [failure, *sampled(2, 3)]) is failure
    assert accept((1, 2), [*sampled(1), failure, *sampled(3)]) == tuple(sampled(1))


def test_several_tokens_of_a_step_come_as_one_delta():
    engine = engine_with(Certain())
    result = run_to_end(engine, [make_spec("s", b"a", max_output_tokens=20)])["s"]
    assert result.finish.output_tokens == 20
    assert max(len(delta.token_ids) for delta in result.deltas) > 1
    load = engine.load_report()
    assert load.num_accepted_draft_tokens == load.num_draft_tokens == 20 - len(result.deltas)


def test_nothing_behind_a_stop_string_is_numbered():
    result = run_to_end(engine_with(Certain()), [make_spec("s", b"a", stop=("ij",), max_output_tokens=30)])["s"]
    assert (result.text, result.finish.output_tokens) == ("bcdefgh", 7)
    assert (result.finish.reason, result.finish.matched_stop) == (FinishReason.STOP, "ij")


def test_nothing_behind_an_end_token_or_the_limit_is_numbered():
    specs = [
        make_spec("ended", b"a", stop_token_ids=(ord("m"),), max_output_tokens=30),
        make_spec("full", b"a", max_output_tokens=9),
    ]
    engine = engine_with(Certain())
    results = run_to_end(engine, specs, after_step=engine.check_integrity)
    assert (results["ended"].text, results["ended"].finish.reason) == ("bcdefghijkl", FinishReason.STOP)
    assert (results["full"].text, results["full"].finish.reason) == ("bcdefghij", FinishReason.LENGTH)
    assert engine.load_report().num_free_blocks == engine.load_report().num_blocks


def test_what_an_output_leaves_in_the_cache_is_the_same_with_proposed_tokens():
    cached = []
    for engine in (make_engine(), engine_with(Certain())):
        run_to_end(engine, [make_spec("s", b"a", stop=("q",), max_output_tokens=30)])
        again = run_to_end(engine, [make_spec("t", b"abcdefghijklmnopqrstuv", max_output_tokens=1)])["t"]
        cached.append((engine.load_report().num_cached_blocks, again.finish.cached_prompt_tokens))
    assert cached[0] == cached[1]


def test_a_step_that_fails_with_proposed_tokens_is_computed_without_them():
    # Proposes what the executor cannot compute.
    proposer = Oracle(lambda _: [RAISES], seed=0)
    proposer._random.random = lambda: 0.0
    engine = engine_with(proposer)
    result = run_to_end(engine, [make_spec("s", b"a", max_output_tokens=6)], after_step=engine.check_integrity)["s"]
    assert (result.text, result.finish.failure) == ("bcdefg", None)


def test_logits_that_are_not_finite_fail_a_sequence_after_the_tokens_before_them():
    start = IS_NAN - 4
    plain = run_to_end(make_engine(), [make_spec("s", [start])])["s"]
    result = run_to_end(engine_with(Certain()), [make_spec("s", [start])])["s"]
    assert result.token_ids == plain.token_ids == tuple(range(start + 1, IS_NAN + 1))
    assert result.finish.failure == plain.finish.failure == NOT_FINITE


def test_proposed_tokens_leave_the_memory_to_those_who_need_it():
    engine = engine_with(Certain(), num_blocks=9, max_running=4, token_budget=8)
    specs = [make_spec(str(number), [number], max_output_tokens=16) for number in range(4)]
    results = run_to_end(engine, specs, after_step=engine.check_integrity)
    assert all(result.finish.output_tokens == 16 for result in results.values())
    assert engine.load_report().num_accepted_draft_tokens > 0


@pytest.mark.parametrize("with_prompt", [False, True])
def test_supposed_counts_are_those_of_a_longer_sequence(with_prompt):
    fields = {"num_prompt_tokens": 3, "with_prompt": with_prompt}
    counts = TokenCounts(token_ids=[5, 6, 7, 8, 8], **fields)
    supposed = counts.supposing((8, 9, 5, 9))
    longer = TokenCounts(token_ids=[5, 6, 7, 8, 8, 8, 9, 5, 9], **fields)
    assert dict(zip(supposed.ids, supposed.counts, strict=True)) == dict(zip(longer.ids, longer.counts, strict=True))
    assert dict(zip(counts.ids, counts.counts, strict=True))[8] == 2
