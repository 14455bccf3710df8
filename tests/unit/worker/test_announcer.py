import asyncio
from datetime import timedelta

import grpc
import pytest
from structlog.testing import capture_logs

from gpu_worker.announcer import Announcer, AnnounceTimes, SchedulerTarget, SessionOverError
from gpu_worker.engine.port import Capabilities
from gpu_worker.session import WorkerSession
from gpu_worker.session_stream import StreamTimes
from inference.internal.v1 import scheduler_pb2
from service_kit.errors import UnavailableError
from service_kit.ids import SchedulerId, new_session_id
from tests.support.polling import eventually

TIMES = AnnounceTimes(answer=timedelta(seconds=1), stream=timedelta(milliseconds=50), retry=timedelta(milliseconds=10))


class NoEngine:
    async def add(self, specs):
        raise AssertionError("nothing is assigned")

    async def abort(self, sequence_ids):
        raise AssertionError("nothing is assigned")


class Replica:
    """Answers announcements; opens a stream in the same moment when told to."""

    def __init__(self, session, epochs):
        self.session = session
        self.epochs = epochs
        self.num_asked = 0
        self.opens = True
        self.error = None
        self.stream = None

    async def announce(self, request):
        self.num_asked += 1
        if self.error is not None:
            raise grpc.aio.AioRpcError(self.error, grpc.aio.Metadata(), grpc.aio.Metadata(), self.error.name)
        if self.opens:
            self.stream = self.session.open_stream(
                session_id=request.session_id, owner_epoch=next(self.epochs), scheduler_id=SchedulerId("s")
            )
        return scheduler_pb2.AnnounceWorkerResponse()

    def hang_up(self):
        self.stream.close(UnavailableError("broken"))
        self.session.release_stream(self.stream)


@pytest.fixture
async def setup():
    session = WorkerSession(
        session_id=new_session_id(),
        capabilities=Capabilities(
            engine="simulated",
            model="m",
            model_revision="r",
            precision="sim",
            context_length=1,
            vocab_size=1,
            num_blocks=1,
            block_size=1,
            max_running=1,
        ),
        engine=NoEngine(),
        times=StreamTimes(),
        clock=lambda: 0.0,
    )
    epochs = iter(range(1, 1000))
    replicas = [Replica(session, epochs), Replica(session, epochs)]
    announcer = Announcer(
        schedulers=[SchedulerTarget(address=str(index), announce=each.announce) for index, each in enumerate(replicas)],
        address="me:1",
        worker_id="w",
        times=TIMES,
    )
    task = asyncio.create_task(announcer.run(session))
    yield session, replicas, task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_broken_stream_goes_back_to_its_owner(setup):
    session, (first, second), _ = setup
    await session.connected.wait()
    first.hang_up()
    await eventually(lambda: first.num_asked == 2)
    assert (second.num_asked, session.connected.is_set()) == (0, True)


async def test_after_silence_the_next_replica_is_asked(setup):
    session, (first, second), _ = setup
    await session.connected.wait()
    session.was_silent = True
    first.hang_up()
    await eventually(lambda: second.num_asked == 1)
    assert (first.num_asked, session.connected.is_set()) == (1, True)


@pytest.mark.parametrize("opens", [True, False])
async def test_replicas_take_turns_until_one_opens_a_stream(setup, opens):
    session, (first, second), _ = setup
    await session.connected.wait()
    first.opens = False
    first.error = grpc.StatusCode.UNAVAILABLE if opens else None
    first.hang_up()
    await eventually(lambda: second.num_asked == 1)
    await session.connected.wait()
    assert first.num_asked == 2


async def test_a_refused_session_is_over(setup):
    session, (first, _), task = setup
    await session.connected.wait()
    first.error = grpc.StatusCode.ABORTED
    first.hang_up()
    with pytest.raises(SessionOverError):
        await asyncio.wait_for(task, 5)


async def test_a_worker_that_differs_from_its_peers_asks_on_says_so_once_and_is_taken_when_they_are_gone(setup):
    session, replicas, _ = setup
    await session.connected.wait()
    for replica in replicas:
        replica.error = grpc.StatusCode.FAILED_PRECONDITION
    with capture_logs() as logs:
        replicas[0].hang_up()
        await eventually(lambda: replicas[1].num_asked > 2)
        for replica in replicas:
            replica.error = None
        await session.connected.wait()
    assert [entry["reason"] for entry in logs if entry["event"] == "announcement_refused"] == ["FAILED_PRECONDITION"]
