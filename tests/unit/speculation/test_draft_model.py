"""When a draft model is asked, and what happens when it cannot answer."""

from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.engine.execution import NOT_FINITE, SampleFailure, SampleRequest
from gpu_worker.engine.sequence import Sequence
from gpu_worker.speculation.draft_model import DraftModelProposer
from gpu_worker.speculation.row_cost import RowCost
from service_kit.sampling import SamplingParams


class Broken:
    def __init__(self):
        self.forgotten = []

    def run(self, plan, requests):
        raise RuntimeError("out of memory")

    def forget(self, sequence_id):
        self.forgotten.append(sequence_id)


class Undecided:
    """Its logits are not finite."""

    def run(self, plan, requests):
        assert all(request.sampling.logprobs is None for request in requests), "nobody asks for those of a draft"
        return [SampleFailure(reason=NOT_FINITE)] * len(requests)

    def forget(self, sequence_id): ...


def make_proposer(executor=None):
    proposer = DraftModelProposer(
        executor or Broken(),
        pool=BlockPool(num_blocks=8, block_size=4),
        context_length=12,
        cost=RowCost([(1, 0.001), (16, 0.002)]),
    )
    sampling = SamplingParams(max_output_tokens=9, temperature=0.0, logprobs=2)
    proposer.bind(
        lambda name, drafts: SampleRequest(
            sequence_id=name, sampling=sampling, position=1 + len(drafts), token_ids=[1], num_prompt_tokens=1
        )
    )
    return proposer


def sequence_of(num_tokens):
    return Sequence(sequence_id="s", token_ids=[1] * num_tokens, num_prompt_tokens=1, max_total_tokens=99, priority=1)


def test_it_is_tried_at_first_and_then_now_and_then():
    proposer = make_proposer()
    rates = [proposer.offer([(sequence_of(3), 4)], 4)[0][0] for _ in range(513)]
    assert [number for number, rate in enumerate(rates) if rate >= 0.9] == [0, 256, 512]


def test_nothing_is_proposed_beyond_its_own_context():
    proposer = make_proposer()
    assert len(proposer.offer([(sequence_of(10), 5)], 5)[0]) == 2
    assert proposer.offer([(sequence_of(20), 5)], 5) == [()]


def test_after_a_failure_it_is_not_asked_again():
    executor = Broken()
    proposer = make_proposer(executor)
    decoding = [(sequence_of(3), 4)]
    assert proposer.offer(decoding, 4) != [()]
    assert proposer.propose({"s": 2}) == {}
    assert proposer.offer(decoding, 4) == [()]
    assert proposer.has_failed
    proposer.forget("s")
    proposer.check_integrity()
    assert executor.forgotten == ["s"]


def test_a_model_that_cannot_tell_is_trusted_less_with_each_time():
    proposer = make_proposer(Undecided())
    decoding = [(sequence_of(3), 4)]
    rates = []
    for _ in range(40):
        rates.append(proposer.offer(decoding, 4)[0][0])
        assert proposer.propose({"s": 2}) == {}
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert rates[-1] < 0.1
    assert not proposer.has_failed, "the assertion above did not fail"


def test_a_long_prompt_is_not_computed_for_the_few_tokens_that_a_sequence_may_still_get():
    # A row more costs the draft model a tenth of a step: 21 missing tokens two of its steps, so twenty have to be left.
    cost = RowCost([(1, 0.010), (101, 0.110)])
    proposer = DraftModelProposer(Broken(), pool=BlockPool(num_blocks=64, block_size=4), context_length=200, cost=cost)

    def offered(num_left):
        sequence = Sequence(
            sequence_id="s", token_ids=[1] * 21, num_prompt_tokens=20, max_total_tokens=21 + num_left, priority=1
        )
        (rates,) = proposer.offer([(sequence, 4)], 4)
        return len(rates)

    assert [offered(num_left) for num_left in (5, 19, 21, 100)] == [0, 0, 4, 4]
