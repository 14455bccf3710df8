"""What tests of the scheduler do again and again."""

from service_kit.delta import Cursor, Delta, make_delta
from state_store.model import State
from tests.support.polling import eventually
from tests.support.scheduler_rig import SchedulerRig, make_generation
from tests.support.scripted_worker import ScriptedWorker


def tokens(after: Delta | None, *ids: int) -> Delta:
    cursor = after.end if after is not None else Cursor()
    return make_delta(after=cursor, token_ids=ids, texts=[f"<{token_id}>" for token_id in ids])


async def granted(rig: SchedulerRig, worker: ScriptedWorker, **changes: object) -> str:
    record = await rig.submit(make_generation(**changes))  # type: ignore[arg-type]
    assert await rig.dispatch()
    await worker.until(lambda: any(a.generation_id == record.generation_id for a in worker.assignments()))
    return record.generation_id


async def gone(rig: SchedulerRig) -> None:
    """Lets the reconnect window pass, whenever the broken stream is noticed."""

    def is_gone() -> bool:
        rig.clock.advance(0.6)
        return not len(rig.parts.registry)

    await eventually(is_gone)


async def queued_again(rig: SchedulerRig, generation_id: str) -> None:
    record = await rig.record(generation_id)
    for _ in range(500):
        record = await rig.record(generation_id)
        entry = (record.model_key, record.generation_id, record.attempt)
        if record.state is State.QUEUED and await rig.stores.queue.contains_many([entry]) == [True]:
            return
    raise AssertionError(f"still {record.state}")
