import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engine.frames import (
    MAX_FRAME_BYTES,
    AbortFrame,
    AckFrame,
    AddFrame,
    BrokenFrameError,
    FatalFrame,
    FrameReader,
    OutputFrame,
    ReadyFrame,
    RefusedFrame,
    encode_frame,
)
from gpu_worker.engine.port import (
    Capabilities,
    LoadReport,
    SequenceFinish,
    SequenceOutput,
    SequenceSpec,
    StepOutput,
    Timings,
)
from service_kit.delta import Cursor, TokenLogprob, make_delta
from service_kit.sampling import FinishReason, SamplingParams

MAX_U64 = (1 << 64) - 1
SPEC = SequenceSpec(
    sequence_id="g/1",
    prompt_token_ids=(1, 2),
    output_token_ids=(),
    sampling=SamplingParams(max_output_tokens=3, stop=("끝",), stop_token_ids=(9,)),
    priority=2,
    nonce=MAX_U64,
)
LOAD = LoadReport(
    step=4,
    num_running=1,
    num_waiting=2,
    max_running=8,
    largest_batch=3,
    num_free_blocks=5,
    num_blocks=9,
    block_size=16,
    kv_waste=0.25,
)
TIMES = Timings(added=1.5, prefill_started=2.0, first_token=2.5, finished=3.0)
DELTA = make_delta(after=Cursor(sequence_number=4, chain=MAX_U64), token_ids=(7, 8), texts=("한", ""))
PROBABLE = make_delta(
    after=DELTA.end, token_ids=(7, 8), texts=("a", "b"), logprobs=(TokenLogprob(-0.5, ((7, -0.5),)), TokenLogprob(-2.0))
)
FRAMES = [
    AddFrame(specs=(SPEC, SPEC)),
    AbortFrame(sequence_ids=("a", "b")),
    AckFrame(step=MAX_U64),
    ReadyFrame(
        capabilities=Capabilities(
            engine="simulated",
            model="m",
            model_revision="r",
            precision="sim",
            context_length=1,
            vocab_size=2,
            num_blocks=3,
            block_size=4,
            max_running=5,
            details={"threads": "2"},
        )
    ),
    OutputFrame(
        output=StepOutput(
            step=4,
            outputs=(
                SequenceOutput(sequence_id="a", delta=DELTA),
                SequenceOutput(
                    sequence_id="b",
                    finish=SequenceFinish(
                        prompt_tokens=1,
                        cached_prompt_tokens=0,
                        output_tokens=2,
                        timings=TIMES,
                        reason=FinishReason.STOP,
                        matched_stop="끝",
                    ),
                ),
                SequenceOutput(
                    sequence_id="c",
                    delta=PROBABLE,
                    finish=SequenceFinish(
                        prompt_tokens=1, cached_prompt_tokens=0, output_tokens=2, timings=TIMES, failure="NaN"
                    ),
                ),
            ),
        ),
        load=LOAD,
        num_pauses=2,
    ),
    RefusedFrame(sequence_id="a", reason="too long"),
    FatalFrame(reason="out of memory"),
]


@given(piece_size=st.integers(1, 500))
def test_frames_come_out_as_they_went_in_however_the_stream_cuts_them(piece_size):
    stream = b"".join(encode_frame(frame) for frame in FRAMES)
    reader = FrameReader()
    out = []
    for start in range(0, len(stream), piece_size):
        out += reader.feed(stream[start : start + piece_size])
    assert out == FRAMES
    assert not reader.is_inside_frame


def test_a_reader_knows_that_it_stands_inside_a_frame():
    reader = FrameReader()
    assert list(reader.feed(encode_frame(FRAMES[0])[:-1])) == []
    assert reader.is_inside_frame


@pytest.mark.parametrize("body", [b"\xc1", b"\x90", b"\x91\xa5hello", b"\x92\xa3ack\xc0", b"\x01", b"\x93\xa3ack\x01"])
def test_bytes_that_are_no_frame_are_an_error(body):
    with pytest.raises(BrokenFrameError):
        list(FrameReader().feed(struct.pack("<I", len(body)) + body))


def test_a_frame_beyond_the_limit_is_refused_on_both_sides():
    with pytest.raises(BrokenFrameError, match=str(MAX_FRAME_BYTES)):
        list(FrameReader().feed(struct.pack("<I", MAX_FRAME_BYTES + 1)))
    with pytest.raises(BrokenFrameError, match=str(MAX_FRAME_BYTES)):
        encode_frame(FatalFrame(reason="x" * (MAX_FRAME_BYTES + 1)))
