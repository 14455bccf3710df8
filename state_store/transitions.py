"""All transitions of a generation, as one table. Pure.

The database repeats them: each write names the state it starts from, and CHECK constraints tie columns to states.

    QUEUED --grant--> RUNNING --finish--> SUCCEEDED | FAILED | CANCELLED | EXPIRED
       ^                 |
       +------lost-------+
    QUEUED --end_queued--> CANCELLED | EXPIRED | FAILED
"""

from enum import StrEnum

from state_store.model import State


class Event(StrEnum):
    """What can happen to a generation."""

    GRANT = "GRANT"
    LOST = "LOST"
    SUCCEED = "SUCCEED"
    FAIL = "FAIL"
    CANCEL = "CANCEL"
    EXPIRE = "EXPIRE"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.QUEUED, Event.GRANT): State.RUNNING,
    (State.QUEUED, Event.FAIL): State.FAILED,
    (State.QUEUED, Event.CANCEL): State.CANCELLED,
    (State.QUEUED, Event.EXPIRE): State.EXPIRED,
    (State.RUNNING, Event.LOST): State.QUEUED,
    (State.RUNNING, Event.SUCCEED): State.SUCCEEDED,
    (State.RUNNING, Event.FAIL): State.FAILED,
    (State.RUNNING, Event.CANCEL): State.CANCELLED,
    (State.RUNNING, Event.EXPIRE): State.EXPIRED,
}

MAX_CHARGED_ATTEMPTS = 3
MAX_ATTEMPTS = 20


class IllegalTransitionError(Exception):
    """An event that the state does not know; nothing was changed."""

    def __init__(self, state: State, event: Event) -> None:
        super().__init__(f"{event} does not apply to {state}")


def next_state(state: State, event: Event) -> State:
    """The state after `event`. Raises IllegalTransitionError."""
    following = TRANSITIONS.get((state, event))
    if following is None:
        raise IllegalTransitionError(state, event)
    return following


def can_end_as(from_state: State, final: State) -> bool:
    """Whether some event leads from `from_state` to the final state `final`."""
    return final.is_terminal and any(start is from_state and end is final for (start, _), end in TRANSITIONS.items())


def has_attempts_left(*, attempt: int, charged_attempts: int) -> bool:
    return charged_attempts < MAX_CHARGED_ATTEMPTS and attempt < MAX_ATTEMPTS
