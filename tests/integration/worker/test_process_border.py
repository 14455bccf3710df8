"""No engine process outlives its worker, and no worker says that it is ready before its engine is."""

import asyncio
import socket
import subprocess

from grpc_health.v1 import health_pb2

from gpu_worker.engine.progress import ProgressPage
from gpu_worker.supervisor import EngineCommand
from tests.integration.worker.scripted_scheduler import assignment
from tests.integration.worker.test_worker_process import (
    engine_pid,
    engine_pids,
    health,
    is_alive,
    worker_process,
)
from tests.support.polling import eventually
from tests.support.tiny_models import make_tiny_llama


async def until_logged(worker, event):
    """Reads the log of worker and engine up to the event; returns its line."""
    async with asyncio.timeout(30):
        async for line in worker.stderr:
            if event in line.decode():
                return line.decode()
    raise AssertionError(f"{event} was never logged")


async def test_while_its_engine_loads_a_worker_is_not_ready_and_leaves_no_engine_when_killed(model_directory, desks):
    (desk, _), addresses = desks
    async with worker_process(
        model_directory, addresses[:1], settings={"load_s": 600}, log=subprocess.PIPE, SLUICE_LOG_LEVEL="INFO"
    ) as worker:
        await until_logged(worker, "engine_loads")
        engine = engine_pid(worker.pid)
        assert await health(worker.address) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not desk.announcements
        worker.kill()
        await worker.wait()
        await eventually(lambda: not is_alive(engine))


async def test_a_worker_that_is_killed_right_behind_the_start_of_its_engine_leaves_none(model_directory, desks):
    _, addresses = desks
    async with worker_process(model_directory, addresses[:1], settings={"load_s": 600}) as worker:
        await eventually(lambda: bool(engine_pids(worker.pid)))
        engine = engine_pid(worker.pid)
        worker.kill()
        await worker.wait()
        await eventually(lambda: not is_alive(engine))


async def test_an_engine_whose_worker_is_gone_before_it_has_begun_does_not_begin(model_directory):
    ours, theirs = socket.socketpair()
    progress = ProgressPage.create()
    command = EngineCommand(model_directory=model_directory, settings={"load_s": 600})
    with theirs:
        ours.close()
        fds = {"fd": theirs.fileno(), "progress_fd": progress.fileno()}
        engine = await asyncio.create_subprocess_exec(*command.arguments(**fds), pass_fds=tuple(fds.values()))
    try:
        assert await asyncio.wait_for(engine.wait(), 30) == 0
    finally:
        progress.close()
        if engine.returncode is None:
            engine.kill()
            await engine.wait()


async def test_an_engine_that_is_not_ready_in_the_configured_time_ends_with_its_worker(model_directory, desks):
    _, addresses = desks
    async with worker_process(
        model_directory, addresses[:1], settings={"load_s": 600}, log=subprocess.PIPE, SLUICE_ENGINE_START_S="1"
    ) as worker:
        await eventually(lambda: bool(engine_pids(worker.pid)))
        engine = engine_pid(worker.pid)
        assert "not ready within 1 s" in await until_logged(worker, "worker_cannot_start")
        assert await asyncio.wait_for(worker.wait(), 10) == 1
        assert not is_alive(engine)


async def test_a_worker_that_is_told_to_stop_while_its_engine_loads_stops_at_once(model_directory, desks):
    _, addresses = desks
    async with worker_process(
        model_directory, addresses[:1], settings={"load_s": 600}, log=subprocess.PIPE, SLUICE_LOG_LEVEL="INFO"
    ) as worker:
        await until_logged(worker, "engine_loads")
        engine = engine_pid(worker.pid)
        worker.terminate()
        assert await asyncio.wait_for(worker.wait(), 10) == 0
        assert not is_alive(engine)


async def test_a_killed_worker_leaves_no_native_engine(tmp_path, desks):
    (desk, _), addresses = desks
    make_tiny_llama(tmp_path, context_length=4096)
    settings = {"num_blocks": 300, "max_running": 4, "threads": 1}
    async with worker_process(tmp_path, addresses[:1], settings=settings) as worker:
        stream = await desk.stream(within_s=90)
        engine = engine_pid(worker.pid)
        await stream.assign(assignment(max_output_tokens=4000, ignore_eos=True))
        await stream.position(1)
        worker.kill()
        await worker.wait()
        await eventually(lambda: not is_alive(engine))
