"""What a gateway remembers of the room in the queues."""

from datetime import timedelta

import pytest

from gateway.queue_room import Places, QueueName, QueueRooms
from service_kit.errors import QuotaExceededError, Reason, UnavailableError
from service_kit.ids import TenantId
from state_store.model import PriorityClass
from tests.support.clock import SteppedClock

HERE = QueueName(revision="r", priority_class=PriorityClass.STANDARD, tenant_id=TenantId("here"))
THERE = QueueName(revision="r", priority_class=PriorityClass.STANDARD, tenant_id=TenantId("there"))
LOWER = QueueName(revision="r", priority_class=PriorityClass.BATCH, tenant_id=TenantId("here"))
OTHER = QueueName(revision="other", priority_class=PriorityClass.STANDARD, tenant_id=TenantId("here"))
BY_REQUESTS = {"bound": "requests"}
FULL = UnavailableError("full", reason=Reason.QUEUE_FULL, retry_after=timedelta(seconds=30), metadata=BY_REQUESTS)
OWN_FULL = QuotaExceededError(
    "full",
    subject="tenant:here:queue",
    reason=Reason.TENANT_QUEUE_FULL,
    retry_after=timedelta(seconds=0.5),
    metadata=BY_REQUESTS,
)


def places(*, queue: int = 100, tenant: int = 100, retry_after_s: float = 0.5) -> Places:
    return Places(queue=queue, tenant=tenant, retry_after=timedelta(seconds=retry_after_s))


def reason_of(rooms: QueueRooms, name: QueueName) -> Reason | None:
    refusal = rooms.refusal(name)
    return None if refusal is None else Reason(refusal.reason)


def test_a_full_queue_is_full_for_everybody_of_its_class_for_a_second() -> None:
    clock = SteppedClock()
    rooms = QueueRooms(now=clock)
    rooms.note_refusal(HERE, FULL)
    for name in (HERE, THERE):
        refusal = rooms.refusal(name)
        assert isinstance(refusal, UnavailableError)
        assert (refusal.retry_after, refusal.metadata) == (timedelta(seconds=1), FULL.metadata)
    assert rooms.refusal(LOWER) is None
    assert rooms.refusal(OTHER) is None
    clock.advance(timedelta(seconds=1))
    assert rooms.refusal(HERE) is None


@pytest.mark.parametrize("metadata", [{"bound": "prompt_tokens"}, {}])
def test_a_prompt_that_was_too_long_does_not_refuse_others(metadata: dict[str, str]) -> None:
    rooms = QueueRooms(now=SteppedClock())
    rooms.note_refusal(HERE, UnavailableError("full", reason=Reason.QUEUE_FULL, metadata=metadata))
    own = QuotaExceededError("full", subject="s", reason=Reason.TENANT_QUEUE_FULL, metadata=metadata)
    rooms.note_refusal(HERE, own)
    assert rooms.refusal(HERE) is None


def test_a_tenants_full_part_refuses_that_tenant_alone_and_names_it() -> None:
    clock = SteppedClock()
    rooms = QueueRooms(now=clock)
    rooms.note_refusal(HERE, OWN_FULL)
    refusal = rooms.refusal(HERE)
    assert isinstance(refusal, QuotaExceededError)
    assert (refusal.reason, refusal.subject) == (Reason.TENANT_QUEUE_FULL, "tenant:here:queue")
    assert rooms.refusal(THERE) is None
    clock.advance(timedelta(seconds=0.5))
    assert rooms.refusal(HERE) is None


def test_a_refusal_about_something_else_is_not_remembered() -> None:
    rooms = QueueRooms(now=SteppedClock())
    rooms.note_refusal(HERE, UnavailableError("away"))
    rooms.note_refusal(HERE, QuotaExceededError("too many", subject="tenant:here:max_concurrent", metadata=BY_REQUESTS))
    assert rooms.refusal(HERE) is None


def test_who_took_the_last_place_of_the_queue_tells_everybody() -> None:
    clock = SteppedClock()
    rooms = QueueRooms(now=clock)
    rooms.note_places(HERE, places(queue=0))
    assert [reason_of(rooms, name) for name in (HERE, THERE, LOWER)] == [Reason.QUEUE_FULL, Reason.QUEUE_FULL, None]
    clock.advance(timedelta(seconds=0.5))
    assert rooms.refusal(HERE) is None


def test_who_took_the_tenants_last_place_tells_that_tenant() -> None:
    rooms = QueueRooms(now=SteppedClock())
    rooms.note_places(HERE, places(tenant=0))
    assert [reason_of(rooms, name) for name in (HERE, THERE)] == [Reason.TENANT_QUEUE_FULL, None]


def test_requests_that_ask_at_this_moment_count_as_if_they_had_their_places() -> None:
    rooms = QueueRooms(now=SteppedClock())
    rooms.note_places(HERE, places(queue=3, tenant=2))
    with rooms.asking(HERE):
        assert rooms.refusal(HERE) is None
        with rooms.asking(HERE):
            assert [reason_of(rooms, name) for name in (HERE, THERE)] == [Reason.TENANT_QUEUE_FULL, None]
            with rooms.asking(THERE):
                assert reason_of(rooms, THERE) == Reason.QUEUE_FULL
    assert rooms.refusal(HERE) is None


def test_a_later_word_of_a_scheduler_replaces_an_earlier_one() -> None:
    rooms = QueueRooms(now=SteppedClock())
    rooms.note_refusal(HERE, FULL)
    rooms.note_places(HERE, places(queue=1))
    assert rooms.refusal(HERE) is None


def test_requests_that_ask_for_what_nothing_is_known_of_are_let_through() -> None:
    rooms = QueueRooms(now=SteppedClock())
    with rooms.asking(HERE):
        assert rooms.refusal(HERE) is None


def test_beyond_its_bound_nothing_more_is_remembered_until_what_is_old_has_run_out() -> None:
    clock = SteppedClock()
    rooms = QueueRooms(now=clock)
    names = [
        QueueName(revision="r", priority_class=PriorityClass.STANDARD, tenant_id=TenantId(f"t{number}"))
        for number in range(10_001)
    ]
    for name in names:
        rooms.note_refusal(name, OWN_FULL)
    assert reason_of(rooms, names[9_999]) == Reason.TENANT_QUEUE_FULL
    assert rooms.refusal(names[10_000]) is None
    clock.advance(timedelta(seconds=0.5))
    rooms.note_refusal(names[10_000], OWN_FULL)
    assert reason_of(rooms, names[10_000]) == Reason.TENANT_QUEUE_FULL
