"""A native engine over an executor that counts: the next token is always the last one plus one."""

import itertools

from gpu_worker.engine.engine import NativeEngine
from gpu_worker.engine.execution import NOT_FINITE, Sampled, SampleFailure
from gpu_worker.engine.port import Capabilities
from gpu_worker.engine.step_scheduler import StepLimits
from gpu_worker.engine.text import TokenTable
from tests.support.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE

RAISES, IS_NAN, UNDRAWABLE = ord("!"), ord("?"), ord("#")


class CountingExecutor:
    """After 'a' comes 'b'. A step with RAISES in it raises, as does one of too many tokens; nothing can be drawn behind
    IS_NAN and UNDRAWABLE.
    """

    def __init__(self, *, max_tokens_at_once):
        self.moves_fail = False
        self.known = set()
        self._max_tokens_at_once = max_tokens_at_once

    def move(self, moves):
        assert moves
        if self.moves_fail:
            raise RuntimeError("the bus is broken")

    def run(self, plan, requests):
        sampled = [planned for planned in plan.sequences if planned.is_sampled]
        assert [request.sequence_id for request in requests] == [planned.sequence_id for planned in sampled]
        self.known.update(planned.sequence_id for planned in plan.sequences)
        if plan.num_tokens > self._max_tokens_at_once:
            raise MemoryError(f"{plan.num_tokens} tokens")
        if any(RAISES in planned.token_ids for planned in plan.sequences):
            raise RuntimeError("out of scratch memory")
        return [self._draw(planned.token_ids) for planned in sampled]

    def _draw(self, token_ids):
        if IS_NAN in token_ids:
            return SampleFailure(reason=NOT_FINITE)
        if UNDRAWABLE in token_ids:
            return SampleFailure(reason="nothing is left to draw", is_suspect=False)
        return Sampled(token_id=(token_ids[-1] + 1) % VOCAB_SIZE)

    def forget(self, sequence_id):
        self.known.discard(sequence_id)


class CountingEngine(NativeEngine):
    """The executor can be reached."""

    def __init__(self, *, executor, **fields):
        super().__init__(executor=executor, **fields)
        self.executor = executor


def make_engine(
    *,
    num_blocks=32,
    max_running=8,
    token_budget=32,
    context_length=128,
    max_tokens_at_once=1000,
    clock=None,
    executor=None,
    **fields,
):
    return CountingEngine(
        executor=executor or CountingExecutor(max_tokens_at_once=max_tokens_at_once),
        capabilities=Capabilities(
            engine="native",
            model="counting",
            model_revision="0",
            precision="fp32",
            context_length=context_length,
            vocab_size=VOCAB_SIZE,
            num_blocks=num_blocks,
            block_size=4,
            max_running=max_running,
        ),
        limits=StepLimits(
            max_running=max_running, token_budget=token_budget, max_long_prefills=1, long_prefill_tokens=16
        ),
        table=TokenTable([bytes([byte]) for byte in range(256)]),
        eos_token_ids=(EOS_TOKEN_ID,),
        clock=clock or itertools.count(1.0).__next__,
        **fields,
    )
