"""What a gateway remembers of full queues."""

from datetime import timedelta

import pytest

from gateway.queue_full import FullQueues
from service_kit.errors import QuotaExceededError, Reason, UnavailableError
from service_kit.ids import TenantId
from state_store.model import PriorityClass
from tests.support.clock import SteppedClock

CLASS = PriorityClass.STANDARD
HERE, THERE = TenantId("here"), TenantId("there")
FULL = UnavailableError(
    "full", reason=Reason.QUEUE_FULL, retry_after=timedelta(seconds=30), metadata={"bound": "requests"}
)
OWN_FULL = QuotaExceededError(
    "full", subject="tenant:here:queue", reason=Reason.TENANT_QUEUE_FULL, retry_after=timedelta(seconds=0.5)
)


def test_a_full_queue_is_full_for_everybody_of_its_class_for_a_second() -> None:
    clock = SteppedClock()
    queues = FullQueues(now=clock)
    queues.note("r", CLASS, HERE, FULL)
    for tenant in (HERE, THERE):
        refusal = queues.refusal("r", CLASS, tenant)
        assert isinstance(refusal, UnavailableError)
        assert (refusal.retry_after, refusal.metadata) == (timedelta(seconds=1), FULL.metadata)
    assert queues.refusal("r", PriorityClass.BATCH, HERE) is None
    assert queues.refusal("other", CLASS, HERE) is None
    clock.advance(timedelta(seconds=1))
    assert queues.refusal("r", CLASS, HERE) is None


@pytest.mark.parametrize("metadata", [{"bound": "prompt_tokens"}, {}])
def test_a_prompt_that_was_too_long_for_the_queue_does_not_refuse_others(metadata: dict[str, str]) -> None:
    queues = FullQueues(now=SteppedClock())
    queues.note("r", CLASS, HERE, UnavailableError("full", reason=Reason.QUEUE_FULL, metadata=metadata))
    assert queues.refusal("r", CLASS, HERE) is None


def test_a_tenants_full_part_refuses_that_tenant_alone_and_names_it() -> None:
    clock = SteppedClock()
    queues = FullQueues(now=clock)
    queues.note("r", CLASS, HERE, OWN_FULL)
    refusal = queues.refusal("r", CLASS, HERE)
    assert isinstance(refusal, QuotaExceededError)
    assert (refusal.reason, refusal.subject) == (Reason.TENANT_QUEUE_FULL, "tenant:here:queue")
    assert queues.refusal("r", CLASS, THERE) is None
    clock.advance(timedelta(seconds=0.5))
    assert queues.refusal("r", CLASS, HERE) is None


def test_a_refusal_about_something_else_is_not_remembered() -> None:
    clock = SteppedClock()
    queues = FullQueues(now=clock)
    queues.note("r", CLASS, HERE, UnavailableError("away"))
    queues.note("r", CLASS, HERE, QuotaExceededError("too many", subject="tenant:here:max_concurrent"))
    assert queues.refusal("r", CLASS, HERE) is None
