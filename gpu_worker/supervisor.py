"""The engine process as the service process sees it: spawn, talk, notice death or a hang, end. No torch, no gRPC."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from gpu_worker.engine.frames import (
    HEADER,
    AbortFrame,
    AckFrame,
    AddFrame,
    BrokenFrameError,
    FatalFrame,
    Frame,
    OutputFrame,
    ReadyFrame,
    RefusedFrame,
    body_length,
    decode_body,
    encode_frame,
)
from gpu_worker.engine.port import Capabilities, SequenceSpec
from gpu_worker.engine.progress import ProgressPage

_WATCH_INTERVAL_S = 0.5
_LONGEST_LOOK_S = 2 * _WATCH_INTERVAL_S


class EngineLostError(Exception):
    """The engine process is gone, hung or speaks nonsense; the text says which. Its sequences are lost with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCommand:
    """What to start. `settings` go to the engine as JSON; `environment` is added to this process's own."""

    model_directory: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, *, fd: int, progress_fd: int) -> list[str]:
        return [
            *(sys.executable, "-m", "gpu_worker.engine"),
            *("--fd", str(fd), "--progress-fd", str(progress_fd)),
            *("--model", str(self.model_directory), "--settings", json.dumps(dict(self.settings))),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """Without progress for the longer of `minimum` and `steps` usual steps a ready engine is hung."""

    minimum: timedelta = timedelta(seconds=10)
    steps: int = 20


class HangDetector:
    """Judges looks at the progress page. Pure: the caller brings the time (seconds, monotonic).

    Only time in which somebody looked counts: when both processes were frozen together (a paused container, a throttled
    control group), the engine had no chance to move.
    """

    def __init__(self, limits: HangLimits, *, now: float) -> None:
        self._limits = limits
        self._turns = -1
        self._looked_at = now
        self._still_s = 0.0
        self.is_late = False
        """Half the time to being hung has passed without progress: reason enough not to be called ready."""

    def observe(self, *, turns: int, step_s: float, now: float) -> bool:
        """Takes one look; True when the engine is hung."""
        if turns == self._turns:
            self._still_s += min(now - self._looked_at, _LONGEST_LOOK_S)
        else:
            self._turns, self._still_s = turns, 0.0
        self._looked_at = now
        limit_s = max(self._limits.minimum.total_seconds(), self._limits.steps * step_s)
        self.is_late = self._still_s > limit_s / 2
        return self._still_s > limit_s


class EngineProcess:
    """Owner of one engine process. One reader (`next_frame`), any number of writers. Not restartable.

    Nothing gathers here: the engine sends at most its window of unacknowledged frames, and writers wait for the socket.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        progress: ProgressPage,
        clock: Callable[[], float],
    ) -> None:
        self._process = process
        self._reader, self._writer = streams
        self._progress = progress
        self._clock = clock
        self._hung_reason = ""
        self._is_ready = False
        self.is_progressing = False
        """Whether the last look of `watch` found recent progress."""
        self._is_closed = False

    @classmethod
    async def spawn(cls, command: EngineCommand, *, clock: Callable[[], float]) -> "EngineProcess":
        """Starts the process; it still has to become ready. Signals to this process's group do not reach it."""
        ours, theirs = socket.socketpair()
        progress = ProgressPage.create()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *command.arguments(fd=theirs.fileno(), progress_fd=progress.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), progress.fileno()),
                start_new_session=True,
                env={**os.environ, **command.environment},
            )
        return cls(process, await asyncio.open_connection(sock=ours), progress, clock)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_ready(self, timeout: timedelta) -> Capabilities:
        """Waits for loading and warm-up. Raises EngineLostError when it fails or takes longer."""
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                frame = await self._read_frame()
        except TimeoutError as error:
            raise EngineLostError(f"not ready within {timeout.total_seconds():g} s") from error
        if not isinstance(frame, ReadyFrame):
            raise EngineLostError(f"{type(frame).__name__} before it was ready")
        self._is_ready = True
        return frame.capabilities

    async def next_frame(self) -> OutputFrame | RefusedFrame:
        """The next news of the engine. Raises EngineLostError once there is none to come."""
        frame = await self._read_frame()
        if not isinstance(frame, OutputFrame | RefusedFrame):
            raise EngineLostError(f"{type(frame).__name__} out of place")
        return frame

    async def add(self, specs: Sequence[SequenceSpec]) -> None:
        await self._write_frame(AddFrame(specs=tuple(specs)))

    async def abort(self, sequence_ids: Sequence[str]) -> None:
        await self._write_frame(AbortFrame(sequence_ids=tuple(sequence_ids)))

    async def ack(self, step: int) -> None:
        await self._write_frame(AckFrame(step=step))

    async def watch(self, limits: HangLimits) -> None:
        """Looks at the progress of a ready engine until it is hung; then kills it, which ends `next_frame`."""
        detector = HangDetector(limits, now=self._clock())
        while True:
            turns, step_s = self._progress.read()
            if detector.observe(turns=turns, step_s=step_s, now=self._clock()):
                self._hung_reason = f"hung: no progress after turn {turns}"
                self.is_progressing = False
                self._kill()
                return
            self.is_progressing = not detector.is_late
            await asyncio.sleep(_WATCH_INTERVAL_S)

    def read_untried(self) -> tuple[str, ...] | None:
        """Of a lost engine, until `close`: the sequences that its fatal step ran before they had made a token in it; None
        when it did not die in a step."""
        return self._progress.read_untried()

    async def close(self, grace: timedelta) -> None:
        """Ends the process: end of file, `grace` to go by itself, then SIGKILL. One that still loads would not see the end
        of file and has nothing to finish: it is killed at once. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._writer.close()
        if not self._is_ready:
            self._kill()
        try:
            async with asyncio.timeout(grace.total_seconds()):
                await self._process.wait()
        except TimeoutError:
            self._kill()
            await self._process.wait()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        self._progress.close()

    def _kill(self) -> None:
        # Not Process.kill: it polls first, and so takes the exit code away from the watcher that is to report it.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    async def _read_frame(self) -> Frame:
        try:
            header = await self._reader.readexactly(HEADER.size)
            frame = decode_body(await self._reader.readexactly(body_length(header)))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise EngineLostError(await self._describe_end()) from error
        except BrokenFrameError as error:
            self._kill()
            raise EngineLostError(str(error)) from error
        if isinstance(frame, FatalFrame):
            raise EngineLostError(frame.reason)
        return frame

    async def _describe_end(self) -> str:
        """Why nothing comes any more. A process that closed its socket has no use left, alive or not."""
        self._kill()
        code = await self._process.wait()
        return self._hung_reason or f"exited with code {code}"

    async def _write_frame(self, frame: Frame) -> None:
        try:
            self._writer.write(encode_frame(frame))
            await self._writer.drain()
        except OSError as error:
            raise EngineLostError(await self._describe_end()) from error
