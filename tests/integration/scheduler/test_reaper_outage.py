from datetime import UTC, datetime

from scheduler.queue.memory import MemoryAdmissionQueue
from state_store.delta_log.memory import MemoryDeltaLog
from state_store.memory.store import MemoryStore
from tests.support.scheduler_rig import Stores, running_scheduler


def _now() -> datetime:
    return datetime.now(tz=UTC)


async def test_a_queue_that_goes_away_between_two_rounds_does_not_end_the_reaper() -> None:
    queue = MemoryAdmissionQueue(_now)
    stores = Stores(store=MemoryStore(), log=MemoryDeltaLog(_now), queue=queue, redis=None)
    async with running_scheduler(stores) as rig:
        await rig.parts.reaper.run_once()
        queue.is_reachable = False
        await rig.parts.reaper.run_once()
        queue.is_reachable = True
        queue.lose_all()
        await rig.parts.reaper.run_once()
        assert await queue.is_ready()
