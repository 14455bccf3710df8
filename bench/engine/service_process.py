"""What the worker's service process can pass on: `python -m bench.engine.service_process`. Prints one JSON line.

The real service process with the simulated engine, which makes a token for each of 256 streams in every step as fast as it
can, and this process in the scheduler's place: it takes delta batches with text at the end of the session's stream, acknowledges
them, and gives a new stream for each that ends. So three processes share the machine.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc

from gpu_worker.artifacts.simulated_model import write_simulated_model
from inference.internal.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2, worker_pb2_grpc
from service_kit.grpc_client import INTERNAL_TOKEN_KEY, open_channel
from service_kit.grpc_server import GrpcServer
from sluice.local.child import free_port
from tests.support.processes import resident_bytes

_TOKEN = "token-of-the-benchmark"  # noqa: S105 - both ends of it are here
_SECONDS_OF_A_SAMPLE = 1.0
_WARM_UP_S = 5.0
_PROMPT_TOKENS = 64
_OUTPUT_TOKENS = 512


class _Desk(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Hears of the worker's session."""

    def __init__(self) -> None:
        self.announced: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def AnnounceWorker(self, request: Any, context: Any) -> Any:  # type: ignore[override]  # noqa: ARG002, N802 - named by the proto
        if not self.announced.done():
            self.announced.set_result(request)
        return scheduler_pb2.AnnounceWorkerResponse(scheduler_id="bench", owner_epoch=1)


class Taker:
    """The scheduler's end of one session stream; counts what arrives."""

    def __init__(self, call: Any, *, num_streams: int) -> None:
        self._call = call
        self._num_streams = num_streams
        self._num_begun = 0
        self._waiting: asyncio.Queue[worker_pb2.SessionRequest] = asyncio.Queue()
        self.num_tokens = 0
        self.num_texts = 0
        self.num_batches = 0
        self.num_ends = 0

    async def say(self) -> None:
        """Writes what there is to say, one message after another."""
        self._begin(self._num_streams)
        while True:
            await self._call.write(await self._waiting.get())

    async def take(self) -> None:
        """Reads until the stream ends."""
        while (response := await self._call.read()) is not grpc.aio.EOF:
            match response.WhichOneof("message"):
                case "delta_batch":
                    self._take_batch(response.delta_batch)
                case "heartbeat":
                    self._waiting.put_nowait(worker_pb2.SessionRequest(verdict=worker_pb2.Verdict()))

    def _take_batch(self, batch: worker_pb2.DeltaBatch) -> None:
        ended = []
        for delta in batch.deltas:
            self.num_tokens += len(delta.token_ids)
            self.num_texts += len(delta.texts)
            if delta.HasField("end"):
                ended.append(delta.attempt)
        self.num_batches += 1
        self._waiting.put_nowait(worker_pb2.SessionRequest(ack=worker_pb2.Ack(batch=batch.batch)))
        if ended:
            self.num_ends += len(ended)
            self._waiting.put_nowait(worker_pb2.SessionRequest(end_ack=worker_pb2.EndAck(attempts=ended)))
            self._begin(len(ended))

    def _begin(self, count: int) -> None:
        sampling = worker_pb2.SamplingParams(max_output_tokens=_OUTPUT_TOKENS, ignore_eos=True, top_p=1.0)
        assignments = [
            worker_pb2.Assignment(
                generation_id=f"00000000-0000-7000-8000-{number:012d}",
                attempt=1,
                prompt_token_ids=[32 + (number + place) % 64 for place in range(_PROMPT_TOKENS)],
                sampling=sampling,
                nonce=number,
            )
            for number in range(self._num_begun, self._num_begun + count)
        ]
        self._num_begun += count
        self._waiting.put_nowait(worker_pb2.SessionRequest(assign=worker_pb2.Assign(assignments=assignments)))


@asynccontextmanager
async def serving(num_streams: int) -> AsyncIterator[tuple[int, Taker]]:
    """The worker's process id, and a taker whose stream is open."""
    desk = _Desk()
    server = GrpcServer(
        listen="127.0.0.1:0",
        services={
            "inference.internal.v1.SchedulerService": lambda target: (
                scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(desk, target)
            )
        },
    )
    scheduler = f"127.0.0.1:{await server.start()}"
    with tempfile.TemporaryDirectory() as directory:
        write_simulated_model(Path(directory), name="simulated", context_length=4096)
        worker = await _start_worker(directory, scheduler, num_streams)
        try:
            announced = await asyncio.wait_for(desk.announced, 60)
            channel = open_channel(announced.address)
            call = worker_pb2_grpc.WorkerServiceStub(channel).Session(metadata=((INTERNAL_TOKEN_KEY, _TOKEN),))
            opening = worker_pb2.Open(session_id=announced.session_id, owner_epoch=1, scheduler_id="bench")
            await call.write(worker_pb2.SessionRequest(open=opening))
            yield worker.pid, Taker(call, num_streams=num_streams)
            call.cancel()
            await channel.close(None)
        finally:
            with contextlib.suppress(ProcessLookupError):
                worker.kill()
            await worker.wait()
            await server.stop(timedelta(0))


async def _start_worker(directory: str, scheduler: str, num_streams: int) -> asyncio.subprocess.Process:
    settings = {"max_running": num_streams, "num_blocks": 64 * num_streams, "step_tokens": 8192}
    environment = {
        "SLUICE_WORKER_LISTEN": f"127.0.0.1:{free_port()}",
        "SLUICE_SCHEDULERS": scheduler,
        "SLUICE_INTERNAL_TOKEN": _TOKEN,
        "SLUICE_MODEL_DIR": directory,
        "SLUICE_ENGINE_SETTINGS": json.dumps(settings),
        "SLUICE_LOG_LEVEL": "ERROR",
        "SLUICE_MAX_DELTAS_PER_S": "0",  # a delta for each token, as many as it can
    }
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gpu_worker"), env={**os.environ, **environment}
    )


async def measure(num_streams: int, seconds: float) -> dict[str, float]:
    """Rates over `seconds` behind a warm-up, and how the memory of the service and the engine process moved meanwhile."""
    async with serving(num_streams) as (pid, taker), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(taker.say()), tasks.create_task(taker.take())]
        await asyncio.sleep(_WARM_UP_S)
        engine_pid = _child_of(pid)
        rates, memory, cpu = [], [], [_cpu_s(each) for each in (pid, engine_pid)]
        began = time.monotonic()
        while (started := time.monotonic()) < began + seconds:
            before = taker.num_tokens, taker.num_texts, taker.num_batches
            await asyncio.sleep(_SECONDS_OF_A_SAMPLE)
            rates.append((taker.num_tokens - before[0]) / (time.monotonic() - started))
            if taker.num_texts - before[1] != taker.num_tokens - before[0]:
                raise RuntimeError("not every token has a text")
            memory.append(resident_bytes(pid) + resident_bytes(engine_pid))
        used = [_cpu_s(each) - at for each, at in zip((pid, engine_pid), cpu, strict=True)]
        for task in running:
            task.cancel()
    wall_s = time.monotonic() - began
    return {
        "tokens_per_s": statistics.fmean(rates),
        "growth_mb": (max(memory[len(memory) // 2 :]) - memory[0]) / 1e6,
        "memory_mb": memory[0] / 1e6,
        "service_cpu": used[0] / wall_s,
        "engine_cpu": used[1] / wall_s,
        "num_ends": float(taker.num_ends),
        "num_batches": float(taker.num_batches),
    }


def _child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    print(json.dumps(asyncio.run(measure(arguments.streams, arguments.seconds))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
