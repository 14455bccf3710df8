"""Workers of one model store keys and values as one type: a stream continues on another worker with the same bits."""

from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio

from service_kit.delta import Cursor, make_delta
from service_kit.rpc_status import parse_rpc_error
from tests.support.polling import eventually, eventually_answers
from tests.support.scheduler_rig import SchedulerRig
from tests.support.scripted_worker import ScriptedWorker


@pytest_asyncio.fixture
async def workers() -> AsyncIterator[list[ScriptedWorker]]:
    """Three that listen: two with keys and values in 32 bits, one in 16. None is announced."""
    workers = [ScriptedWorker() for _ in range(3)]
    for worker, kv_dtype in zip(workers, ("float32", "float32", "float16"), strict=True):
        worker.capabilities.kv_dtype = kv_dtype
        await worker.start()
    yield workers
    for worker in workers:
        await worker.stop()


async def join(rig: SchedulerRig, worker: ScriptedWorker) -> None:
    num_ready = len(rig.parts.registry.ready())
    await worker.announce(rig.address)
    await eventually(lambda: len(rig.parts.registry.ready()) > num_ready)


async def takes(rig: SchedulerRig, worker: ScriptedWorker, generation_id: str) -> tuple[int, list[int]]:
    """The attempt that the worker gets, and the output that it continues."""

    async def is_assigned() -> bool:
        await rig.dispatch()
        return any(each.generation_id == generation_id for each in worker.assignments())

    await eventually_answers(is_assigned)
    [assignment] = [each for each in worker.assignments() if each.generation_id == generation_id]
    return assignment.attempt, list(assignment.output_token_ids)


async def add_token(worker: ScriptedWorker, generation_id: str, attempt: int, after: Cursor) -> Cursor:
    delta = make_delta(after=after, token_ids=[10 + attempt], texts=["x"])
    num_acknowledged = len(worker.received_of("ack"))
    worker.say(generation_id, attempt, delta)
    await worker.until(lambda: len(worker.received_of("ack")) > num_acknowledged)
    return delta.end


async def test_a_worker_with_another_kv_type_than_its_peers_is_refused_by_name_of_the_field(
    rig: SchedulerRig, workers: list[ScriptedWorker]
) -> None:
    await join(rig, workers[0])
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await workers[2].announce(rig.address)
    failure = parse_rpc_error(refused.value)
    assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WORKER_DIFFERS")
    assert failure.metadata["field"] == "capabilities.kv_dtype"
    assert failure.message == ("capabilities.kv_dtype: is float16, live workers of scripted-model have float32")
    await join(rig, workers[1])
    assert not workers[2].received


async def test_when_workers_change_their_kv_type_one_after_another_a_stream_stays_with_the_old_one_to_the_last(
    rig: SchedulerRig, workers: list[ScriptedWorker]
) -> None:
    first, second, new = workers
    await join(rig, first)
    generation_id = (await rig.submit()).generation_id
    assert await takes(rig, first, generation_id) == (1, [])
    end = await add_token(first, generation_id, 1, Cursor())
    await join(rig, second)
    # The first is restarted: it hands back, and comes back with the new type while the second is still there.
    first.hang_up()
    with pytest.raises(grpc.aio.AioRpcError):
        await new.announce(rig.address)
    assert await takes(rig, second, generation_id) == (2, [11])
    end = await add_token(second, generation_id, 2, end)
    # The second is the last of the old type: now the new one is taken, and the stream goes on behind what was shown.
    second.lose_engine(untried=None)

    async def is_taken() -> bool:
        try:
            await new.announce(rig.address)
        except grpc.aio.AioRpcError:
            return False
        return True

    await eventually_answers(is_taken)
    assert await takes(rig, new, generation_id) == (3, [11, 12])
    end = await add_token(new, generation_id, 3, end)
    new.say(generation_id, 3, None, finish_reason="STOP", output_tokens=end.sequence_number)
    await new.until(lambda: (generation_id, 3) in new.ended())
    record = await rig.record(generation_id)
    [output] = await rig.stores.store.read_output_many([record.generation_id])
    assert output is not None
    assert (output.token_ids, record.charged_attempts) == ((11, 12, 13), 0)
