"""The engine process: `python -m gpu_worker.engine --fd N --progress-fd M --model DIR --settings JSON`.

Spawned by the worker's service process, never forked. Settings are those of the engine that the model's precision asks
for: SimulatedSettings for "sim", EngineSettings otherwise.
"""

import argparse
import ctypes
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from gpu_worker.engine.frames import FatalFrame, encode_frame
from gpu_worker.engine.port import Engine
from gpu_worker.engine.process import EngineLoop
from gpu_worker.engine.progress import ProgressPage
from gpu_worker.engine.simulated import load_simulated_engine
from gpu_worker.engine.simulated_settings import SIMULATED_PRECISION, SimulatedSettings
from service_kit.environment import Environment
from service_kit.garbage import forget_startup_objects
from service_kit.logging import LogFormat, configure_logging, get_logger
from service_kit.model_manifest import read_manifest

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Runs until the service process closes the socket."""
    parser = argparse.ArgumentParser(prog="python -m gpu_worker.engine")
    parser.add_argument("--fd", type=int, required=True, help="connected Unix socket to the service process")
    parser.add_argument("--progress-fd", type=int, required=True, help="file behind the shared progress page")
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    parser.add_argument("--settings", default="{}", help="settings of the engine as a JSON object")
    arguments = parser.parse_args()
    connection = socket.socket(fileno=arguments.fd)
    _die_with_parent()
    if _is_alone(connection):
        return 0
    environment = Environment(os.environ)
    configure_logging(
        service="gpu_worker.engine",
        level=environment.text("SLUICE_LOG_LEVEL", "INFO"),
        log_format=LogFormat(environment.text("SLUICE_LOG_FORMAT", LogFormat.JSON)),
    )
    get_logger().info("engine_loads", model_directory=str(arguments.model))
    progress = ProgressPage.open(arguments.progress_fd)
    try:
        engine = load_engine(arguments.model, json.loads(arguments.settings), progress)
    except Exception as error:
        connection.sendall(encode_frame(FatalFrame(reason=f"{type(error).__name__}: {error}")))
        raise
    forget_startup_objects()
    EngineLoop(engine, connection, progress, clock=time.monotonic).run()
    return 0


def load_engine(directory: Path, settings: dict[str, Any], progress: ProgressPage) -> Engine:
    """The engine for a model directory."""
    if read_manifest(directory).precision == SIMULATED_PRECISION:
        return load_simulated_engine(
            directory, settings=SimulatedSettings(**settings), note_untried=progress.note_untried
        )
    # Only here is torch loaded: the simulated engine starts without it.
    from gpu_worker.engine.loading import load_native_engine  # noqa: PLC0415
    from gpu_worker.engine.settings import EngineSettings  # noqa: PLC0415

    return load_native_engine(
        directory,
        settings=EngineSettings(**settings),
        note_untried=progress.note_untried,
        on_progress=progress.turn,
    )


def _die_with_parent() -> None:
    """A hung engine does not read end of file: the kernel ends it with its parent where it can (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _is_alone(connection: socket.socket) -> bool:
    """Whether the service process went before the kernel was told to end this one with it."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


if __name__ == "__main__":
    sys.exit(main())
