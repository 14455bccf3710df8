"""The whole worker as its own process, with its engine process behind it, against scripted schedulers."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gpu_worker.engine.simulated_tokens import expected_output
from gpu_worker.session_stream import MAX_UNACKNOWLEDGED_BATCHES
from inference.internal.v1 import worker_pb2
from service_kit.grpc_client import open_channel
from sluice.local.child import free_port
from tests.integration.worker.scripted_scheduler import TOKEN, assignment
from tests.support.polling import eventually
from tests.support.tiny_models import encode

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"


@asynccontextmanager
async def worker_process(model_directory, schedulers, *, settings=None, log=None, **environment):
    """A running worker; it is killed at the end unless it has gone by itself. `log` takes what it and its engine say."""
    address = f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gpu_worker"),
        env={
            **os.environ,
            "SLUICE_WORKER_LISTEN": address,
            "SLUICE_SCHEDULERS": ",".join(schedulers),
            "SLUICE_INTERNAL_TOKEN": TOKEN,
            "SLUICE_MODEL_DIR": str(model_directory),
            "SLUICE_ENGINE_SETTINGS": json.dumps(settings or {}),
            "SLUICE_LOG_LEVEL": "WARNING",
            **environment,
        },
        stderr=log,
    )
    process.address = address
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def health(address) -> int:
    channel = open_channel(address)
    try:
        stub = health_pb2_grpc.HealthStub(channel)
        response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        return response.status
    finally:
        await channel.close(None)


def engine_pids(worker_pid: int) -> list[int]:
    """The worker's children."""
    return [int(pid) for pid in Path(f"/proc/{worker_pid}/task/{worker_pid}/children").read_text().split()]


def engine_pid(worker_pid: int) -> int:
    """The worker's only child."""
    (pid,) = engine_pids(worker_pid)
    return pid


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] not in "ZX"


async def test_a_worker_announces_itself_serves_its_session_and_drains_at_sigterm(model_directory, desks, tmp_path):
    (desk, _), addresses = desks
    async with worker_process(
        model_directory, addresses[:1], settings={"tokens_per_s": 20}, SLUICE_TRACE_DIR=str(tmp_path)
    ) as worker:
        stream = await desk.stream()
        announced = desk.announcements[0]
        assert announced.address == worker.address
        assert announced.capabilities.model == "simulated"
        async with asyncio.timeout(10):
            while await health(worker.address) != health_pb2.HealthCheckResponse.SERVING:  # noqa: ASYNC110 - polled
                await asyncio.sleep(0.05)
        await stream.assign(assignment(traceparent=f"00-{TRACE_ID}-{SPAN_ID}-01"))
        await stream.position(2)
        worker.send_signal(signal.SIGTERM)
        await eventually(lambda: any(beat.load.is_draining for beat in stream.of("heartbeat")))
        assert await health(worker.address) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await stream.end()).finish_reason == "LENGTH"
        expected = expected_output(prompt_token_ids=encode("hello"), prior_output=[], seed=0, nonce=0, count=20)
        assert list(stream.output().token_ids) == expected
        await stream.end_ack()
        await stream.closes_with(grpc.StatusCode.OK)
        assert await asyncio.wait_for(worker.wait(), 10) == 0
    spans = [json.loads(line) for path in tmp_path.glob("gpu_worker-*.jsonl") for line in path.read_text().splitlines()]
    by_name = {span["name"]: span for span in spans}
    assert set(by_name) == {"worker.prefill", "worker.decode"}
    for span in spans:
        assert (span["trace_id"], span["parent_id"]) == (TRACE_ID, SPAN_ID)
        assert (span["attributes"]["generation_id"], span["attributes"]["attempt"]) == ("g", 1)
    assert by_name["worker.decode"]["attributes"]["tokens"] == 20
    assert by_name["worker.prefill"]["end_unix_ns"] == by_name["worker.decode"]["start_unix_ns"]
    assert by_name["worker.decode"]["end_unix_ns"] - by_name["worker.decode"]["start_unix_ns"] > 500_000_000


async def test_what_does_not_finish_in_the_drain_time_is_left_to_others(model_directory, desks):
    (desk, _), addresses = desks
    async with worker_process(
        model_directory, addresses[:1], settings={"tokens_per_s": 5}, SLUICE_DRAIN_S="0.5"
    ) as worker:
        stream = await desk.stream()
        await stream.assign(assignment(max_output_tokens=1000))
        await stream.position(1)
        worker.send_signal(signal.SIGTERM)
        await stream.closes_with(grpc.StatusCode.OK)
        assert await asyncio.wait_for(worker.wait(), 10) == 0
        assert not stream.ends


async def test_the_death_of_the_engine_ends_the_session_and_a_new_one_begins(model_directory, desks):
    (desk, _), addresses = desks
    async with worker_process(model_directory, addresses[:1], settings={"has_prompt_faults": True}):
        stream = await desk.stream()
        await stream.assign(assignment(prompt="<<fault:crash-once-after=3>>"))
        await stream.closes_with(grpc.StatusCode.ABORTED)
        assert stream.output().last <= 3
        again = await desk.stream(1)
        assert desk.announcements[-1].session_id != desk.announcements[0].session_id
        assert list((await again.hello()).held) == []
        assert list((await again.hello()).cached_prefixes) == [], "a new engine's cache is empty"
        await again.assign(
            assignment(attempt=2, prompt="<<fault:crash-once-after=3>>", output=stream.output().token_ids)
        )
        assert (await again.end()).output_tokens == 20


async def test_the_last_word_of_a_session_names_what_the_fatal_step_ran_first(model_directory, desks):
    (desk, _), addresses = desks
    settings = {"has_prompt_faults": True, "tokens_per_s": 20, "max_running": 2}
    async with worker_process(model_directory, addresses[:1], settings=settings):
        stream = await desk.stream()
        await stream.assign(assignment("neighbour", max_output_tokens=1000))
        await stream.position(1, "neighbour")
        await stream.assign(assignment("poison", prompt="<<fault:crash>>"), assignment("waiting"))
        await stream.closes_with(grpc.StatusCode.ABORTED)
        (lost,) = stream.of("engine_lost")
        assert stream.messages[-1].WhichOneof("message") == "engine_lost"
        assert [each.generation_id for each in lost.untried] == ["poison"]
        assert lost.is_step_known


async def test_an_idle_engine_that_is_killed_leaves_the_cause_open(model_directory, desks):
    (desk, _), addresses = desks
    async with worker_process(model_directory, addresses[:1]) as worker:
        stream = await desk.stream()
        os.kill(engine_pid(worker.pid), signal.SIGKILL)
        await stream.closes_with(grpc.StatusCode.ABORTED)
        (lost,) = stream.of("engine_lost")
        assert not lost.is_step_known


async def test_a_hung_engine_is_replaced(model_directory, desks):
    (desk, _), addresses = desks
    async with worker_process(
        model_directory, addresses[:1], settings={"has_prompt_faults": True}, SLUICE_ENGINE_HANG_S="2"
    ) as worker:
        stream = await desk.stream()
        hung = engine_pid(worker.pid)
        await stream.assign(assignment(prompt="<<fault:hang>>"))
        await desk.stream(1)
        await stream.closes_with(grpc.StatusCode.ABORTED)
        assert not is_alive(hung)


async def test_a_silent_scheduler_is_exchanged_for_another_that_gets_everything(model_directory, desks):
    (first, second), addresses = desks
    first.answers = False
    async with worker_process(model_directory, addresses):
        silent = await first.stream()
        await silent.assign(assignment())
        await silent.position(MAX_UNACKNOWLEDGED_BATCHES)
        stream = await second.stream()
        await silent.closes_with(grpc.StatusCode.UNAVAILABLE)
        hello = await stream.hello()
        assert hello.session_id == first.announcements[0].session_id
        assert [(held.position, held.is_finished) for held in hello.held] == [(20, True)]
        await stream.verdict(worker_pb2.VERDICT_ACTION_RESEND_FROM, resend_from=11)
        await stream.end()
        assert (stream.output().first, stream.output().last) == (11, 20)


async def test_a_scheduler_that_opens_no_stream_is_exchanged_for_another(model_directory, desks):
    (first, second), addresses = desks
    first.opens = False
    async with worker_process(model_directory, addresses):
        await second.stream()
        assert len(first.announcements) == 1


async def test_a_session_that_schedulers_count_as_over_is_given_up_without_a_new_engine(model_directory, desks):
    (desk, _), addresses = desks
    async with worker_process(model_directory, addresses[:1], settings={"tokens_per_s": 5}) as worker:
        stream = await desk.stream()
        engine = engine_pid(worker.pid)
        await stream.assign(assignment(prompt="a block of sixteen tokens", max_output_tokens=1000))
        await stream.position(1)
        desk.over.add(desk.announcements[0].session_id)
        await stream.__aexit__()
        again = await desk.stream(1)
        assert (await again.hello()).session_id not in desk.over
        assert list((await again.hello()).held) == []
        assert len((await again.hello()).cached_prefixes) == 1, "the engine and its cache are the same"
        assert (await again.hello()).load.step > 0
        await eventually(lambda: bool(again.of("heartbeat")) and again.of("heartbeat")[-1].load.num_running == 0)
        assert engine_pid(worker.pid) == engine


@pytest.mark.parametrize("fault", ["hang", "slow=600"])
async def test_a_killed_worker_leaves_no_engine_behind_even_one_that_does_not_listen(fault, model_directory, desks):
    (desk, _), addresses = desks
    async with worker_process(model_directory, addresses[:1], settings={"has_prompt_faults": True}) as worker:
        stream = await desk.stream()
        engine = engine_pid(worker.pid)
        await stream.assign(assignment(prompt=f"<<fault:{fault}>>"))
        await eventually(lambda: any(beat.held for beat in stream.of("heartbeat")))
        worker.kill()
        await worker.wait()
        await eventually(lambda: not is_alive(engine))


async def test_an_engine_that_cannot_start_ends_the_worker(model_directory, desks):
    _, addresses = desks
    async with worker_process(model_directory, addresses, settings={"num_blocks": 0}) as worker:
        assert await asyncio.wait_for(worker.wait(), 30) == 1


async def test_a_worker_waits_for_its_model(model_directory, desks, tmp_path):
    (desk, _), addresses = desks
    later = tmp_path / "later"
    async with worker_process(later, addresses[:1]) as worker:
        await asyncio.sleep(2)
        assert worker.returncode is None
        shutil.copytree(model_directory, tmp_path / "copy")
        (tmp_path / "copy").rename(later)
        await desk.stream()


async def test_a_model_that_does_not_come_ends_the_worker(desks, tmp_path):
    _, addresses = desks
    async with worker_process(tmp_path / "absent", addresses, SLUICE_ENGINE_START_S="1") as worker:
        assert await asyncio.wait_for(worker.wait(), 30) == 1


async def test_a_worker_that_waits_for_its_model_ends_at_sigterm(desks, tmp_path):
    _, addresses = desks
    async with worker_process(tmp_path / "absent", addresses) as worker:
        await asyncio.sleep(3)  # it has started to wait by then; before, the signal ends it in another way
        worker.terminate()
        assert await asyncio.wait_for(worker.wait(), 30) == 0
