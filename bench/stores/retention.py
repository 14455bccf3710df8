"""What is left of many requests of every kind once the retention periods, which are shortened, are over."""

import asyncio
from collections.abc import Iterator, Sequence

from bench.fairness.arena import Plan
from bench.figures import Figure
from tests.support.mixed_requests import Remains, Rows, brief_stack, send_and_forget

_NUM_REQUESTS = 2000
_AT_ONCE = 40
_KEPT_S = 10
_CHECKED = 20
"""So many of those that are kept, and of those that are not, are asked for again."""


def retention(plan: Plan) -> Sequence[Figure]:
    num_requests = plan.count(_NUM_REQUESTS)
    with brief_stack(kept_s=_KEPT_S, overrides={"SLUICE_LOG_LEVEL": "WARNING"}) as stack:
        remains = asyncio.run(
            send_and_forget(stack, num_requests=num_requests, at_once=_AT_ONCE, checked=_CHECKED, timeout_s=120)
        )
    for line in (*remains.left, *remains.replay_faults, *remains.refusal_faults):
        print(f"       {line}", flush=True)
    return list(_figures(f"{num_requests} mixed requests", remains))


def _figures(name: str, remains: Remains) -> Iterator[Figure]:
    yield Figure(name=f"{name}: sent in, s", value=remains.sent_in_s)
    yield Figure(name=f"{name}: until nothing is left, s", value=remains.clean_after_s)
    yield Figure(name=f"{name}: keys and texts left", value=len(remains.left), at_most=0)
    yield from _row_figures(name, remains.rows, remains.expected)
    yield Figure(name=f"{name}: kept ones answered wrongly", value=len(remains.replay_faults), at_most=0)
    yield from _row_figures(f"{name}, their day over", remains.rows_after_drop, remains.expected_after_drop)
    yield Figure(
        name=f"{name}: cursors on expired ones, not OUT_OF_RANGE", value=len(remains.refusal_faults), at_most=0
    )


def _row_figures(name: str, rows: Rows, expected: Rows) -> Iterator[Figure]:
    """Exactly what the policy says."""
    for what, found, wanted in (
        ("generations", rows.generations, expected.generations),
        ("without texts", rows.emptied, expected.emptied),
        ("live", rows.live, expected.live),
        ("in the ledger", rows.ledger, expected.ledger),
    ):
        yield Figure(name=f"{name}: {what}", value=found, at_least=wanted, at_most=wanted)
