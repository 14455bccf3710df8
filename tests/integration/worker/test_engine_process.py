import asyncio
import os
import signal
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta

import pytest

from gpu_worker.engine.frames import AckFrame, OutputFrame, RefusedFrame, encode_frame
from gpu_worker.engine.port import SequenceSpec
from gpu_worker.engine.process import MAX_UNACKNOWLEDGED_STEPS
from gpu_worker.engine.simulated_tokens import expected_output
from gpu_worker.supervisor import EngineCommand, EngineLostError, EngineProcess, HangLimits
from service_kit.delta import join
from service_kit.sampling import FinishReason, SamplingParams
from tests.support.polling import eventually
from tests.support.tiny_models import encode, make_tiny_llama

START = timedelta(seconds=60)
GRACE = timedelta(seconds=10)


@asynccontextmanager
async def engine_process(directory, **settings):
    command = EngineCommand(model_directory=directory, settings=settings)
    engine = await EngineProcess.spawn(command, clock=time.monotonic)
    try:
        yield engine
    finally:
        await engine.close(GRACE)


def spec(sequence_id="a", prompt="hello", max_output_tokens=20, nonce=5):
    return SequenceSpec(
        sequence_id=sequence_id,
        prompt_token_ids=encode(prompt),
        output_token_ids=(),
        sampling=SamplingParams(max_output_tokens=max_output_tokens),
        priority=0,
        nonce=nonce,
    )


async def run_to_end(engine, sequence_id="a"):
    deltas = []
    while True:
        frame = await engine.next_frame()
        await engine.ack(frame.output.step)
        for output in frame.output.outputs:
            if output.sequence_id == sequence_id:
                deltas += [output.delta] if output.delta else []
                if output.finish:
                    return join(deltas), output.finish


async def test_a_sequence_runs_in_the_engine_process_to_its_end(model_directory):
    async with engine_process(model_directory, token_mode="nonce") as engine:
        capabilities = await engine.wait_ready(START)
        assert (capabilities.engine, capabilities.precision) == ("simulated", "sim")
        await engine.add([spec()])
        delta, finish = await run_to_end(engine)
        expected = expected_output(prompt_token_ids=encode("hello"), prior_output=[], seed=0, nonce=5, count=20)
        assert list(delta.token_ids) == expected
        assert finish.reason is FinishReason.LENGTH


async def test_an_abort_right_behind_its_add_ends_the_sequence_as_cancelled(model_directory):
    async with engine_process(model_directory, tokens_per_s=20) as engine:
        await engine.wait_ready(START)
        await engine.add([spec(max_output_tokens=1000)])
        await engine.abort(["a"])
        _, finish = await run_to_end(engine)
        assert finish.reason is FinishReason.CANCELLED


async def test_an_impossible_sequence_is_refused_with_the_reason(model_directory):
    async with engine_process(model_directory) as engine:
        await engine.wait_ready(START)
        await engine.add([spec(max_output_tokens=5000)])
        frame = await engine.next_frame()
        assert isinstance(frame, RefusedFrame)
        assert (frame.sequence_id, "context" in frame.reason) == ("a", True)


async def test_without_acknowledgements_the_engine_pauses_and_loses_nothing(model_directory):
    async with engine_process(model_directory) as engine:
        await engine.wait_ready(START)
        await engine.add([spec(max_output_tokens=50)])
        frames = [await engine.next_frame() for _ in range(MAX_UNACKNOWLEDGED_STEPS)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(pending := asyncio.ensure_future(engine.next_frame())), 0.3)
        await engine.ack(frames[-1].output.step)
        frames.append(await pending)
        assert isinstance(frames[-1], OutputFrame)
        assert frames[-1].num_pauses == 1
        await engine.ack(frames[-1].output.step)
        rest, _ = await run_to_end(engine)
        seen = join(output.delta for frame in frames for output in frame.output.outputs)
        assert (seen.last + 1, rest.last) == (rest.first, 50)


async def test_the_engine_process_exits_at_end_of_file(model_directory):
    async with engine_process(model_directory) as engine:
        await engine.wait_ready(START)
        await engine.close(GRACE)
        assert engine._process.returncode == 0


async def test_a_paused_engine_process_exits_at_end_of_file_too(model_directory):
    async with engine_process(model_directory) as engine:
        await engine.wait_ready(START)
        await engine.add([spec(max_output_tokens=50)])
        for _ in range(MAX_UNACKNOWLEDGED_STEPS):
            await engine.next_frame()
        await engine.close(GRACE)
        assert engine._process.returncode == 0


async def test_a_killed_engine_process_is_noticed(model_directory):
    async with engine_process(model_directory) as engine:
        await engine.wait_ready(START)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineLostError, match="-9"):
            await asyncio.wait_for(engine.next_frame(), 10)


async def test_a_crash_marker_ends_the_process(model_directory):
    async with engine_process(model_directory, has_prompt_faults=True) as engine:
        await engine.wait_ready(START)
        await engine.add([spec(prompt="<<fault:crash>>")])
        with pytest.raises(EngineLostError, match="exited with code 70"):
            await asyncio.wait_for(engine.next_frame(), 10)


async def test_a_hung_engine_is_killed_and_a_slow_one_is_not(model_directory):
    limits = HangLimits(minimum=timedelta(seconds=1.5), steps=3)
    async with engine_process(model_directory, has_prompt_faults=True) as engine, asyncio.TaskGroup() as tasks:
        await engine.wait_ready(START)
        watch = tasks.create_task(engine.watch(limits))
        await engine.add([spec("slow", prompt="<<fault:slow=0.8>>", max_output_tokens=3)])
        _, finish = await run_to_end(engine, "slow")
        assert finish.reason is FinishReason.LENGTH
        assert not watch.done()
        await engine.add([spec("hang", prompt="<<fault:hang>>")])
        with pytest.raises(EngineLostError, match="hung"):
            await asyncio.wait_for(engine.next_frame(), 60)


async def test_an_idle_engine_is_not_hung(model_directory):
    async with engine_process(model_directory) as engine:
        await engine.wait_ready(START)
        before = engine._progress.read()[0]
        await eventually(lambda: engine._progress.read()[0] >= before + 2)


async def test_a_broken_frame_ends_the_engine_with_a_clear_error(model_directory):
    async with engine_process(model_directory) as engine:
        await engine.wait_ready(START)
        engine._writer.write(b"\x01\x00\x00\x00\xc1")
        with pytest.raises(EngineLostError, match="BrokenFrameError"):
            await asyncio.wait_for(engine.next_frame(), 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class BabblingCommand(EngineCommand):
    """Starts a process that says `said` instead of frames, and then nothing more."""

    said: bytes

    def arguments(self, *, fd, progress_fd):
        return [sys.executable, "-c", f"import os, time; os.write({fd}, {self.said!r}); time.sleep(600)"]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"\x01\x00\x00\x00\xc1", "not a frame"),
        (b"\xff\xff\xff\xff", "bytes exceeds"),
        (encode_frame(AckFrame(step=1)), "AckFrame before it was ready"),
    ],
)
async def test_a_process_that_says_no_proper_frame_is_ended_with_the_reason(said, reason, tmp_path):
    command = BabblingCommand(model_directory=tmp_path, said=said)
    engine = await EngineProcess.spawn(command, clock=time.monotonic)
    with pytest.raises(EngineLostError, match=reason):
        await engine.wait_ready(START)
    await engine.close(GRACE)
    assert engine._process.returncode == -signal.SIGKILL


async def test_loading_that_takes_longer_than_it_may_is_ended(model_directory):
    async with engine_process(model_directory, load_s=600) as engine:
        with pytest.raises(EngineLostError, match=r"not ready within 0\.2 s"):
            await engine.wait_ready(timedelta(seconds=0.2))
    assert engine._process.returncode == -signal.SIGKILL


async def test_weights_that_are_cut_short_are_reported_by_the_native_engine(tmp_path):
    make_tiny_llama(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    async with engine_process(tmp_path, num_blocks=32, max_running=4, threads=1) as engine:
        with pytest.raises(EngineLostError, match=r"model\.safetensors"):
            await engine.wait_ready(START)


async def test_an_engine_that_cannot_load_says_why(tmp_path, model_directory):
    async with engine_process(tmp_path) as engine:
        with pytest.raises(EngineLostError, match=r"sluice-model\.json"):
            await engine.wait_ready(START)
    async with engine_process(model_directory, num_blocks=0) as engine:
        with pytest.raises(EngineLostError, match="num_blocks"):
            await engine.wait_ready(START)


async def test_the_native_engine_runs_behind_the_same_border(tmp_path):
    make_tiny_llama(tmp_path)
    async with engine_process(tmp_path, num_blocks=32, max_running=4, threads=1) as engine:
        capabilities = await engine.wait_ready(START)
        assert (capabilities.engine, capabilities.precision) == ("native", "fp32")
        await engine.add([spec("a"), spec("b")])
        await engine.abort(["b"])
        delta, finish = await run_to_end(engine)
        assert (delta.last, finish.output_tokens) == (finish.output_tokens, finish.output_tokens)
        assert finish.failure is None
