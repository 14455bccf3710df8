"""What a step costs the scheduler: microseconds for schedule and update, without any model.

Run: python -m bench.step_scheduler
"""

import random
from collections.abc import Callable
from statistics import median
from time import perf_counter

from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.engine.sequence import Sequence, StepPlan
from gpu_worker.engine.step_scheduler import StepLimits, StepScheduler
from service_kit.prefix_hash import prefix_root

ROOT = prefix_root(model_fingerprint="bench", tenant_salt="tenant")
BATCH = 64
STEP_US = 80_000
"""A step of 64 sequences on the machine that this is meant for takes at least so long."""


def make_scheduler(*, num_host_blocks: int = 0, target_step_s: float | None = None) -> StepScheduler:
    limits = StepLimits(
        max_running=BATCH,
        token_budget=32_768,
        max_long_prefills=64,
        long_prefill_tokens=2048,
        target_step_s=target_step_s,
    )
    return StepScheduler(
        pool=BlockPool(num_blocks=16_384, block_size=16), limits=limits, num_host_blocks=num_host_blocks
    )


def make_sequence(name: str, token_ids: list[int]) -> Sequence:
    return Sequence(
        sequence_id=name,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        max_total_tokens=len(token_ids) + 1024,
        priority=1,
        prefix_root=ROOT,
    )


def random_tokens(count: int) -> list[int]:
    return [random.randrange(49_152) for _ in range(count)]  # noqa: S311 - only has to differ


def finish(scheduler: StepScheduler, plan: StepPlan) -> None:
    scheduler.update(plan, {planned.sequence_id: (17,) for planned in plan.sequences if planned.is_sampled})


def timed(action: Callable[[], object]) -> float:
    start = perf_counter()
    action()
    return (perf_counter() - start) * 1e6


def measure_decode(*, context: int, num_waiting: int = 0, target_step_s: float | None = None) -> float:
    scheduler = make_scheduler(target_step_s=target_step_s)
    for number in range(BATCH + num_waiting):
        scheduler.add(make_sequence(str(number), random_tokens(context)))
        if number < BATCH:
            plan = scheduler.schedule()
            scheduler.observe(plan, 1e-6)
            finish(scheduler, plan)
    return median(timed(lambda: finish(scheduler, scheduler.schedule())) for _ in range(400))


def measure_admission(*, shared: int, num_sequences: int = 16) -> tuple[float, float]:
    """The steps that take in 16 prompts of 1,000 tokens: microseconds of adding and planning, and of publishing."""
    scheduler = make_scheduler()
    prefix = random_tokens(shared)
    scheduler.add(make_sequence("first", prefix + random_tokens(1000 - shared)))
    finish(scheduler, scheduler.schedule())
    sequences = [make_sequence(str(number), prefix + random_tokens(1000 - shared)) for number in range(num_sequences)]
    plans: list[StepPlan] = []

    def take_in() -> None:
        for sequence in sequences:
            scheduler.add(sequence)
        plans.append(scheduler.schedule())

    planning = timed(take_in)
    assert scheduler.num_running == num_sequences + 1
    return planning, timed(lambda: finish(scheduler, plans[0]))


def show(label: str, microseconds: float) -> None:
    print(f"{label:<66} {microseconds:9.0f} us   {100 * microseconds / STEP_US:6.2f} % of 80 ms")


def main() -> None:
    random.seed(7)
    for context in (200, 1000):
        show(f"decode of 64 at {context} tokens, schedule + update", measure_decode(context=context))
    show("the same with 32 waiting", measure_decode(context=1000, num_waiting=32))
    show("the same with a target", measure_decode(context=1000, target_step_s=10.0))
    for shared in (0, 960, 992):
        results = [measure_admission(shared=shared) for _ in range(5)]
        show(f"16 prompts of 1,000 tokens, {shared} found: add + schedule", median(result[0] for result in results))
        show(f"16 prompts of 1,000 tokens, {shared} found: update", median(result[1] for result in results))


if __name__ == "__main__":
    main()
