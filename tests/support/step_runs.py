"""Sequences and schedulers for tests, and a driver that computes nothing."""

from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine.step_scheduler import StepLimits, StepScheduler
from service_kit.prefix_hash import prefix_root

INTERACTIVE, STANDARD, BATCH = 0, 1, 2
ROOT = prefix_root(model_fingerprint="model", tenant_salt="tenant")
OTHER_ROOT = prefix_root(model_fingerprint="model", tenant_salt="other tenant")


def make_scheduler(*, num_blocks=100, block_size=4, num_host_blocks=0, **limits):
    """Reserves nothing for growth unless told, so that what fits now comes in."""
    defaults = {
        "max_running": 8,
        "token_budget": 64,
        "max_long_prefills": 8,
        "long_prefill_tokens": 32,
        "initial_growth_ratio": 0.0,
        "min_growth_ratio": 0.0,
    }
    return StepScheduler(
        pool=BlockPool(num_blocks=num_blocks, block_size=block_size),
        limits=StepLimits(**{**defaults, **limits}),
        num_host_blocks=num_host_blocks,
    )


def make_sequence(name, tokens, *, output=20, priority=STANDARD, root=ROOT):
    token_ids = list(tokens)
    return Sequence(
        sequence_id=name,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        max_total_tokens=len(token_ids) + output,
        priority=priority,
        prefix_root=root,
    )


def finish_step(scheduler, plan):
    """Records a plan as computed; every drawn token is 7. Returns tokens per sequence."""
    scheduler.update(plan, {planned.sequence_id: (7,) for planned in plan.sequences if planned.is_sampled})
    scheduler.check_integrity()
    return {planned.sequence_id: len(planned.token_ids) for planned in plan.sequences}


def run_step(scheduler):
    plan = scheduler.schedule()
    scheduler.check_integrity()
    return finish_step(scheduler, plan)


def run_all(scheduler, final_lengths, sequences):
    """Runs until every sequence has its final length; returns the step (from 1) at which each returned, and each plan."""
    ends, plans = {}, []
    for sequence in sequences:
        scheduler.add(sequence)
    live = {sequence.sequence_id: sequence for sequence in sequences}
    while live:
        plan = scheduler.schedule()
        plans.append(plan)
        finish_step(scheduler, plan)
        for name, sequence in list(live.items()):
            if sequence.num_tokens >= final_lengths[name]:
                scheduler.remove(name)
                ends[name] = len(plans)
                del live[name]
    return ends, plans
