"""One worker session with a stepped engine behind a real server."""

from datetime import timedelta
from time import monotonic

from gpu_worker.session import WorkerSession
from gpu_worker.session_stream import StreamTimes
from service_kit.ids import new_session_id
from tests.integration.worker.scripted_scheduler import ScriptedStream
from tests.integration.worker.stepped_engine import SteppedEngine
from tests.support.polling import eventually

TIMES = StreamTimes(heartbeat=timedelta(milliseconds=50), silence=timedelta(seconds=2))


class Setup:
    """One session with a stepped engine behind a real server."""

    def __init__(self, directory, *, times=TIMES, **settings):
        self.engine = SteppedEngine(directory, **settings)
        self.session = WorkerSession(
            session_id=new_session_id(),
            capabilities=self.engine.engine.capabilities(),
            engine=self.engine,
            times=times,
            clock=monotonic,
        )
        self.engine.session = self.session
        self.address = ""

    def stream(self, owner_epoch=1, **kwargs):
        return ScriptedStream(
            self.address, **{"session_id": self.session.session_id, "owner_epoch": owner_epoch} | kwargs
        )

    async def has_added(self, number=1):
        await eventually(lambda: self.engine.num_added >= number)
