"""After mixed requests and the retention periods nothing is left but what the policy keeps. `bench/stores/retention.py`
sends many more."""

from collections.abc import Iterator

import pytest

from tests.support.mixed_requests import brief_stack, send_and_forget
from tests.support.stack import RunningStack

NUM_REQUESTS = 30


@pytest.fixture(scope="module")
def brief() -> Iterator[RunningStack]:
    with brief_stack(kept_s=3) as stack:
        yield stack


async def test_nothing_is_left_but_what_the_policy_keeps(brief: RunningStack) -> None:
    remains = await send_and_forget(brief, num_requests=NUM_REQUESTS, at_once=NUM_REQUESTS, checked=2)
    assert remains.left == []
    assert remains.rows == remains.expected
    assert remains.replay_faults == []
    assert remains.rows_after_drop == remains.expected_after_drop
    assert remains.refusal_faults == []
