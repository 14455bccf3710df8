"""The simulated engine in the test's own process, one step at a time: what a session sends is decided by the test."""

from gpu_worker.engine.frames import OutputFrame, RefusedFrame
from gpu_worker.engine.port import RefusedSequenceError
from gpu_worker.engine.simulated import load_simulated_engine
from gpu_worker.engine.simulated_settings import SimulatedSettings
from gpu_worker.session import WorkerSession


class SteppedEngine:
    """EngineLink of one session."""

    def __init__(self, directory, **settings) -> None:
        self.engine = load_simulated_engine(directory, settings=SimulatedSettings(**settings))
        self.session: WorkerSession | None = None
        self.num_added = 0

    async def add(self, specs) -> None:
        for spec in specs:
            self.num_added += 1
            try:
                self.engine.add(spec)
            except RefusedSequenceError as error:
                self.session.take_frame(RefusedFrame(sequence_id=spec.sequence_id, reason=str(error)))

    async def abort(self, sequence_ids) -> None:
        for sequence_id in sequence_ids:
            self.engine.abort(sequence_id)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            output = self.engine.step()
            self.session.take_frame(OutputFrame(output=output, load=self.engine.load_report(), num_pauses=0))
