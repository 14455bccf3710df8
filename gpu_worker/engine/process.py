"""The engine process's loop: frames in, a step, a frame out. No torch; single-threaded."""

import select
import socket
from collections.abc import Callable
from typing import assert_never

from gpu_worker.engine.frames import (
    AbortFrame,
    AckFrame,
    AddFrame,
    BrokenFrameError,
    FatalFrame,
    Frame,
    FrameReader,
    OutputFrame,
    ReadyFrame,
    RefusedFrame,
    encode_frame,
)
from gpu_worker.engine.port import Engine, RefusedSequenceError
from gpu_worker.engine.progress import ProgressPage

MAX_UNACKNOWLEDGED_STEPS = 8
_RECEIVE_BYTES = 1 << 20


class EngineLoop:
    """Runs one engine for the process at the other end of a socket, until that end closes.

    The socket is polled at the top of each step and waited for when there is nothing to do, at most `idle_turn_s` at a
    time, so that the progress page keeps moving. With 8 steps unacknowledged the engine pauses: it takes frames in but
    computes nothing, and counts the pause.
    """

    def __init__(
        self,
        engine: Engine,
        connection: socket.socket,
        progress: ProgressPage,
        *,
        clock: Callable[[], float],
        idle_turn_s: float = 1.0,
    ) -> None:
        self._engine = engine
        self._connection = connection
        self._progress = progress
        self._clock = clock
        self._idle_turn_s = idle_turn_s
        self._reader = FrameReader()
        self._unacknowledged: list[int] = []
        self._num_pauses = 0
        self._is_paused = False

    def run(self) -> None:
        """Returns at end of file. Raises BrokenFrameError, and what the engine raises, after saying so to the peer."""
        try:
            self._send(ReadyFrame(capabilities=self._engine.capabilities()))
            while self.run_once():
                pass
        except (BrokenPipeError, ConnectionResetError):
            return  # the service process is gone: nobody is left to work for
        except Exception as error:
            self._say_fatal(error)
            raise

    def run_once(self) -> bool:
        """One turn; False when the peer has closed."""
        self._progress.turn()
        may_step = self._may_step()
        if not self._receive(timeout_s=0.0 if may_step else self._idle_turn_s):
            return False
        if self._may_step():
            self._step()
        return True

    def _may_step(self) -> bool:
        if not self._engine.has_work():
            return False
        is_full = len(self._unacknowledged) >= MAX_UNACKNOWLEDGED_STEPS
        self._num_pauses += is_full and not self._is_paused
        self._is_paused = is_full
        return not is_full

    def _step(self) -> None:
        started = self._clock()
        output = self._engine.step()
        self._progress.forget_untried()
        self._progress.step_took(self._clock() - started)
        self._unacknowledged.append(output.step)
        self._send(OutputFrame(output=output, load=self._engine.load_report(), num_pauses=self._num_pauses))

    def _receive(self, *, timeout_s: float) -> bool:
        """Takes in what has arrived; False at end of file."""
        while select.select([self._connection], [], [], timeout_s)[0]:
            data = self._connection.recv(_RECEIVE_BYTES)
            if not data:
                if self._reader.is_inside_frame:
                    raise BrokenFrameError("the connection ended inside a frame")
                return False
            for frame in self._reader.feed(data):
                self._handle(frame)
            timeout_s = 0.0
        return True

    def _handle(self, frame: Frame) -> None:
        match frame:
            case AddFrame():
                for spec in frame.specs:
                    self._progress.note_untried([spec.sequence_id])
                    try:
                        self._engine.add(spec)
                    except RefusedSequenceError as error:
                        self._send(RefusedFrame(sequence_id=spec.sequence_id, reason=str(error)))
                self._progress.forget_untried()
            case AbortFrame():
                for sequence_id in frame.sequence_ids:
                    self._engine.abort(sequence_id)
            case AckFrame():
                self._unacknowledged = [step for step in self._unacknowledged if step > frame.step]
            case ReadyFrame() | OutputFrame() | RefusedFrame() | FatalFrame():
                raise BrokenFrameError(f"{type(frame).__name__} is not for the engine")
            case _:
                assert_never(frame)

    def _send(self, frame: Frame) -> None:
        self._connection.sendall(encode_frame(frame))

    def _say_fatal(self, error: Exception) -> None:
        try:
            self._send(FatalFrame(reason=f"{type(error).__name__}: {error}"))
        except OSError:
            return  # the exit code still says it
