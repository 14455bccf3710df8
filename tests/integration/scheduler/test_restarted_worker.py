"""A worker that was killed and is back at its address: its older session is given up at once, and only then."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from service_kit.ids import SessionId, new_session_id
from state_store.model import CancelCause, SessionState, State
from state_store.ports import LostSession
from tests.support.polling import eventually, eventually_answers
from tests.support.scheduler_rig import SchedulerRig, Stores, running_scheduler
from tests.support.scripted_worker import ScriptedWorker


@dataclass(slots=True, kw_only=True)
class Killed:
    """A worker and its scheduler died in the middle of attempt 1; nothing has noticed. The second scheduler lives."""

    second: SchedulerRig
    old: ScriptedWorker
    generation_id: str
    stores: Stores

    async def states(self) -> dict[SessionId, SessionState]:
        sessions = await self.stores.store.list_sessions(include_over=True)
        return {session.session_id: session.state for session in sessions}

    async def owned(self) -> bool:
        return bool(self.second.parts.registry.ready())


@pytest_asyncio.fixture
async def killed(real_stores: Stores) -> AsyncIterator[Killed]:
    async with running_scheduler(real_stores) as first, running_scheduler(real_stores) as second:
        old = ScriptedWorker()
        await old.start()
        await old.announce(first.address)
        await eventually(lambda: bool(first.parts.registry.ready()))
        record = await first.submit()
        assert await first.dispatch()
        await first.parts.registry.stop()
        await old.stop()
        yield Killed(second=second, old=old, generation_id=record.generation_id, stores=real_stores)


async def test_what_a_killed_worker_ran_continues_when_it_is_back_without_waiting_for_its_lease(killed: Killed) -> None:
    new = ScriptedWorker()
    await new.start(killed.old.address)
    await new.announce(killed.second.address)

    async def is_assigned() -> bool:
        await killed.second.dispatch()
        return bool(new.assignments())

    await eventually_answers(is_assigned)
    [assignment] = new.assignments()
    assert (assignment.generation_id, assignment.attempt) == (killed.generation_id, 2)
    assert (await killed.states())[killed.old.session_id] is SessionState.LOST
    [first, _] = await killed.stores.store.attempts_of((await killed.second.record(killed.generation_id)).generation_id)
    assert first.is_charged  # it added nothing, and why it died is not known
    await new.stop()


async def test_an_announcement_alone_gives_up_nothing_when_another_process_answers_at_the_address(
    killed: Killed,
) -> None:
    # A newer incarnation runs the attempt at the address. One that is cut off announces itself under the same name and
    # address, with an id minted later still: the process that answers there refuses its session.
    owner = ScriptedWorker()
    await owner.start(killed.old.address)
    await owner.announce(killed.second.address)
    await eventually_answers(killed.owned)
    ghost = ScriptedWorker(new_session_id())
    ghost.address = owner.address
    await ghost.announce(killed.second.address)
    await eventually(lambda: owner.num_refused > 0)

    async def is_ghost_over() -> bool:
        return (await killed.states())[ghost.session_id] is SessionState.LOST

    await eventually_answers(is_ghost_over)
    assert (await killed.states())[owner.session_id] is SessionState.LIVE
    await owner.stop()


async def test_a_delayed_announcement_of_the_old_incarnation_does_not_give_up_the_new_one(killed: Killed) -> None:
    delayed = new_session_id()
    new = ScriptedWorker()
    await new.start(killed.old.address)
    await new.announce(killed.second.address)
    await eventually_answers(killed.owned)
    late = ScriptedWorker(delayed)
    late.address = new.address
    await late.announce(killed.second.address)
    await eventually(lambda: new.num_refused > 0)

    async def is_late_over() -> bool:
        return (await killed.states())[delayed] is SessionState.LOST

    await eventually_answers(is_late_over)
    assert (await killed.states())[new.session_id] is SessionState.LIVE
    await new.stop()


async def test_a_worker_of_the_same_name_at_another_address_leaves_a_paused_one_its_attempt(killed: Killed) -> None:
    twin = ScriptedWorker()
    await twin.start()
    await twin.announce(killed.second.address)
    await eventually_answers(killed.owned)
    # It was heard, so what it could give up would be given up by now or a moment later: ask in its name as well.
    assert await killed.stores.store.lose_older(twin.session_id, 1) == []
    record = await killed.second.record(killed.generation_id)
    assert (record.state, record.attempt, record.session_id) == (State.RUNNING, 1, killed.old.session_id)
    await twin.stop()


async def test_a_cancel_after_a_takeover_reaches_the_worker_that_runs_the_attempt(killed: Killed) -> None:
    # The same incarnation, back after its scheduler died: the new owner did not assign the attempt itself.
    await killed.old.start(killed.old.address)
    killed.old.hold(killed.generation_id, 1, position=3)
    await killed.old.announce(killed.second.address)
    await eventually_answers(killed.owned)
    record = await killed.second.record(killed.generation_id)
    await killed.second.parts.cancellation.request([(record.generation_id, CancelCause.CLIENT)])
    await eventually(lambda: bool(killed.old.received_of("cancel")))
    await killed.old.stop()


async def test_that_older_sessions_cannot_be_lost_is_told_at_once_while_the_new_one_goes_on(
    killed: Killed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> list[LostSession]:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(killed.stores.store, "lose_older", fails)
    new = ScriptedWorker()
    await new.start(killed.old.address)
    with capture_logs() as logs:
        await new.announce(killed.second.address)
        await eventually(lambda: any(entry["event"] == "older_sessions_not_lost" for entry in logs))
    await eventually_answers(killed.owned)
    await new.stop()
