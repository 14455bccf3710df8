"""When proposing pays: what is expected to be right against what its rows cost."""

import itertools

import pytest

from gpu_worker.engine.sequence import PlannedSequence, Sequence, StepPlan
from gpu_worker.speculation.acceptance import AcceptanceBook
from gpu_worker.speculation.choice import StepPrice, choose
from gpu_worker.speculation.port import DraftableStep
from gpu_worker.speculation.row_cost import RowCost
from gpu_worker.speculation.row_seconds import measure_rows
from gpu_worker.speculation.speculator import Speculator

FLAT = StepPrice(seconds=lambda rows: 1.0 + 1e-6 * rows, propose_seconds=lambda _: 0.0)
PROPORTIONAL = StepPrice(seconds=lambda rows: 0.1 + rows, propose_seconds=lambda _: 0.0)


def test_rows_that_cost_nothing_are_all_filled():
    choice = choose([(0.5,) * 4, (0.9,) * 2], num_rows=2, most=100, price=FLAT)
    assert choice.counts == (4, 2)
    assert choice.gain == pytest.approx((2 + 0.5 + 0.25 + 0.125 + 0.0625 + 0.9 + 0.81) / 2, rel=1e-4)


def test_rows_at_full_price_are_worth_it_only_when_nearly_certain():
    assert choose([(0.8,) * 4], num_rows=1, most=100, price=PROPORTIONAL).counts == (0,)
    assert choose([(0.99,) * 2], num_rows=1, most=100, price=PROPORTIONAL).counts == (2,)


def test_the_best_tokens_come_first_when_room_is_short():
    choice = choose([(0.5, 0.5), (0.9, 0.9), ()], num_rows=3, most=2, price=FLAT)
    assert choice.counts == (0, 2, 0)


def test_a_dear_proposer_is_not_asked():
    dear = StepPrice(seconds=FLAT.seconds, propose_seconds=lambda depth: 2.0 * depth)
    choice = choose([(0.9,) * 3], num_rows=1, most=10, price=dear)
    assert (choice.counts, choice.gain) == ((0,), 1.0)


def test_rows_that_would_make_a_step_too_long_are_not_taken():
    price = StepPrice(seconds=lambda rows: 1.0 + 0.1 * rows, propose_seconds=lambda _: 0.0, target_s=1.45)
    assert choose([(0.99,) * 6], num_rows=1, most=10, price=price).counts == (3,)


def test_a_step_in_the_cost_is_looked_beyond():
    # The second row is dear, four more come with it: only many tokens pay.
    tiles = StepPrice(seconds=lambda rows: 1.0 if rows < 2 else 2.0, propose_seconds=lambda _: 0.0)
    assert choose([(0.95,) * 5], num_rows=1, most=10, price=tiles).counts == (5,)
    assert choose([(0.95,)], num_rows=1, most=10, price=tiles).counts == (0,)


def test_row_cost_is_linear_between_what_is_known_and_goes_on_beyond():
    cost = RowCost([(1, 1.0), (5, 2.0), (9, 2.0), (17, 4.0)])
    assert [cost.predict(rows) for rows in (1, 3, 5, 7, 13)] == [1.0, 1.5, 2.0, 2.0, 3.0]
    assert cost.predict(33) == pytest.approx(4.0 + 16 * (4.0 - 2.0) / (17 - 9))
    assert RowCost([(4, 2.0)]).predict(8) == pytest.approx(4.0)


def test_row_cost_follows_a_slower_machine_for_all_numbers_of_rows():
    cost = RowCost([(1, 1.0), (4, 1.5)])
    for _ in range(60):
        cost.observe(1, 3.0)
    assert cost.predict(1) == pytest.approx(3.0, rel=0.05)
    assert cost.predict(4) > 2.5


def test_row_cost_learns_that_one_number_of_rows_is_dear():
    cost = RowCost([(1, 1.0), (4, 1.0)])
    for rows in itertools.chain.from_iterable(itertools.repeat((1, 4), 60)):
        cost.observe(rows, 1.0 if rows == 1 else 2.5)
    assert cost.predict(4) / cost.predict(1) == pytest.approx(2.5, rel=0.15)


@pytest.mark.parametrize("known", [[], [(0, 1.0)], [(1, 0.0)]])
def test_row_cost_needs_something_to_begin_with(known):
    with pytest.raises(ValueError, match="known"):
        RowCost(known)


def test_a_sequence_counts_more_than_the_others_and_they_more_than_the_prior():
    book = AcceptanceBook((0.5, 0.9))
    assert (book.rate("a", 0), book.rate("a", 1)) == (0.5, 0.9)
    for _ in range(50):
        book.record("good", 0, is_right=True)
        book.record("bad", 0, is_right=False)
    assert book.rate("good", 0) > 0.9
    assert 0.4 < book.rate("new", 0) < 0.6
    assert book.rate("bad", 0) < 0.1
    book.forget("good")
    assert book.rate("good", 0) == book.rate("new", 0)


class Steps:
    """An executor that only takes its time, and one of the timers that tells it."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.now = 0.0
        self.forgotten = []

    def run(self, plan, requests):
        assert len(requests) == plan.num_tokens
        self.now += self.seconds(plan.num_tokens)
        return []

    def forget(self, sequence_id):
        self.forgotten.append(sequence_id)


def test_rows_are_measured_without_spikes(monkeypatch):
    steps = Steps(lambda rows: {3: 50.0}.get(rows, 0.001 * rows))
    monkeypatch.setattr("time.perf_counter", lambda: steps.now)
    measured = dict(measure_rows(steps, most=64, block_size=16))
    # The disturbed step takes no longer than that of four rows; it used up the patience, so that no large ones follow.
    assert measured == pytest.approx({1: 0.001, 2: 0.002, 3: 0.004, 4: 0.004, 5: 0.005, 6: 0.006, 8: 0.008})
    assert steps.forgotten == ["warm-up"]


class Offers:
    """Implements `Proposer`: the same rates for all sequences."""

    has_failed = False

    def __init__(self, *rates):
        self.rates = rates
        self.num_asked = 0

    def offer(self, decoding, most):
        self.num_asked += 1
        return [self.rates[: min(most, room)] for _, room in decoding]

    def seconds(self, depth):
        return 0.0

    def propose(self, counts):
        return {name: (7,) * count for name, count in counts.items()}


def step_of(num_sequences, target_s=None):
    sequences = [
        Sequence(sequence_id=str(n), token_ids=[1], num_prompt_tokens=1, max_total_tokens=99, priority=1)
        for n in range(num_sequences)
    ]
    return DraftableStep(
        decoding=tuple((each, 50) for each in sequences), num_rows=num_sequences, room=1000, target_s=target_s
    )


def plan_of(num_rows):
    planned = PlannedSequence(sequence_id="0", start=1, token_ids=(1,), block_table=(0,), is_sampled=True)
    return StepPlan(sequences=(planned,) * num_rows)


COST = ((1, 1.0), (8, 1.4), (32, 4.0), (64, 8.0))


def test_the_same_rates_pay_for_one_and_not_for_many():
    proposer = Offers(*(0.7,) * 7)
    speculator = Speculator(proposer, RowCost(COST), max_draft_tokens=7, timer=lambda: 0.0)
    assert len(speculator.propose(step_of(1))["0"]) >= 4
    assert speculator.propose(step_of(32)) == {}
    assert speculator.propose(step_of(1))


def test_a_step_takes_no_longer_than_its_target_because_of_proposed_tokens():
    speculator = Speculator(Offers(*(0.9,) * 7), RowCost(COST), max_draft_tokens=7, timer=lambda: 0.0)
    assert len(speculator.propose(step_of(1))["0"]) == 7
    # A row costs 0.4 / 7.
    assert len(speculator.propose(step_of(1, target_s=1.2))["0"]) == 3


def test_what_pays_little_goes_on_but_does_not_start():
    proposer = Offers(0.5)
    cost = RowCost([(1, 1.0), (2, 1.38)])
    speculator = Speculator(proposer, cost, max_draft_tokens=7, timer=lambda: 0.0)
    assert speculator.propose(step_of(1)) == {}
    proposer.rates = (0.9,)
    assert speculator.propose(step_of(1))
    proposer.rates = (0.5,)
    assert speculator.propose(step_of(1))
    assert (speculator.counts.is_on, speculator.counts.num_stops) == (True, 0)
    proposer.rates = (0.4,)
    assert speculator.propose(step_of(1)) == {}
    assert (speculator.counts.is_on, speculator.counts.num_stops) == (False, 1)
    assert speculator.propose(step_of(1)) == {}
    assert speculator.counts.num_stops == 1, "it was off already"


def test_speculation_is_off_when_the_proposer_has_failed():
    proposer = Offers(0.9)
    speculator = Speculator(proposer, RowCost(COST), max_draft_tokens=7, timer=lambda: 0.0)
    assert speculator.propose(step_of(1))
    proposer.has_failed = True
    speculator.propose(step_of(1))
    assert (speculator.counts.is_on, speculator.counts.num_stops) == (False, 1)


def test_looking_up_in_vain_is_held_to_a_small_share_of_the_time():
    proposer = Offers()
    ticks = itertools.count(step=0.001)
    speculator = Speculator(proposer, RowCost(COST), max_draft_tokens=7, timer=ticks.__next__)
    for _ in range(1000):
        speculator.propose(step_of(32))
        speculator.observe(plan_of(32), 0.01)
    assert 40 <= proposer.num_asked <= 60, "0.005 of 10 s, a millisecond each"


def test_a_plain_step_now_and_then_keeps_its_time_known():
    speculator = Speculator(Offers(*(0.9,) * 7), RowCost(COST), max_draft_tokens=7, timer=lambda: 0.0)
    plain = sum(not speculator.propose(step_of(1)) for _ in range(640))
    assert plain == 10


def test_a_step_with_a_prefill_teaches_nothing_about_rows():
    cost = RowCost(COST)
    speculator = Speculator(Offers(), cost, max_draft_tokens=7)
    prefill = PlannedSequence(sequence_id="p", start=0, token_ids=(1,) * 9, block_table=(0,), is_sampled=True)
    speculator.observe(StepPlan(sequences=(prefill,)), 99.0)
    assert cost.predict(9) == RowCost(COST).predict(9)
