"""Every frame type with every field, as hypothesis makes them up: what goes in comes out, down to the types."""

from dataclasses import fields
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.engine.frames import (
    AbortFrame,
    AckFrame,
    AddFrame,
    FatalFrame,
    Frame,
    FrameReader,
    OutputFrame,
    ReadyFrame,
    RefusedFrame,
    encode_frame,
)
from gpu_worker.engine.port import (
    CacheChanges,
    Capabilities,
    LoadReport,
    SequenceFinish,
    SequenceOutput,
    SequenceSpec,
    StepOutput,
    Timings,
)
from service_kit.delta import Delta, TokenLogprob
from service_kit.sampling import FinishReason, SamplingParams

U64 = st.integers(0, (1 << 64) - 1)
U32 = st.integers(0, (1 << 32) - 1)
TEXT = st.text(max_size=8)
FLOAT32 = st.floats(width=32, allow_nan=False)
TIME = st.floats(0, 4e9)


def tuples_of(strategy, max_size=4):
    return st.lists(strategy, max_size=max_size).map(tuple)


SAMPLING = st.builds(
    SamplingParams,
    max_output_tokens=st.integers(10, 1000),
    min_output_tokens=st.integers(0, 10),
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 1000),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 10),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(U32, st.floats(-100, 100), max_size=3).map(lambda biases: tuple(sorted(biases.items()))),
    seed=st.integers(0, (1 << 63) - 1),
    stop=tuples_of(st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=8)),
    stop_token_ids=tuples_of(U32),
    include_stop=st.booleans(),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
)
SPEC = st.builds(
    SequenceSpec,
    sequence_id=TEXT,
    prompt_token_ids=tuples_of(U32),
    output_token_ids=tuples_of(U32),
    sampling=SAMPLING,
    priority=st.integers(0, 2),
    nonce=U64,
    prefix_salt=TEXT,
)
LOGPROB = st.builds(TokenLogprob, FLOAT32, tuples_of(st.tuples(U32, FLOAT32)))


@st.composite
def deltas(draw):
    count = draw(st.integers(1, 4))

    def some(strategy):
        return draw(st.lists(strategy, min_size=count, max_size=count).map(tuple))

    return Delta(
        first=draw(st.integers(1, 1 << 32)),
        token_ids=some(U32),
        texts=some(TEXT),
        prev_chain=draw(U64),
        chain=draw(U64),
        logprobs=some(LOGPROB) if draw(st.booleans()) else (),
    )


FINISH = st.builds(
    SequenceFinish,
    prompt_tokens=U32,
    cached_prompt_tokens=U32,
    output_tokens=U32,
    timings=st.builds(Timings, added=TIME, prefill_started=TIME, first_token=TIME, finished=TIME),
    reason=st.none() | st.sampled_from(FinishReason),
    failure=st.none() | TEXT,
    matched_stop=st.none() | TEXT,
)
OUTPUT = st.builds(
    StepOutput,
    step=U64,
    outputs=tuples_of(
        st.builds(SequenceOutput, sequence_id=TEXT, delta=st.none() | deltas(), finish=st.none() | FINISH)
    ),
    cache_changes=st.builds(CacheChanges, added=tuples_of(U64), removed=tuples_of(U64)),
)


def flat(kind, **strategies):
    """A dataclass whose other fields are counts."""
    return st.builds(kind, **{field.name: U64 for field in fields(kind)} | strategies)


LOAD = flat(LoadReport, kv_waste=st.floats(0, 1), room_blocks=st.tuples(U64, U64, U64))
CAPABILITIES = flat(
    Capabilities,
    **dict.fromkeys(("engine", "model", "model_revision", "precision", "kv_dtype"), TEXT),
    is_batch_invariant=st.booleans(),
    details=st.dictionaries(TEXT, TEXT, max_size=3),
)
FRAMES = {
    AddFrame: st.builds(AddFrame, specs=tuples_of(SPEC, max_size=2)),
    AbortFrame: st.builds(AbortFrame, sequence_ids=tuples_of(TEXT)),
    AckFrame: st.builds(AckFrame, step=U64),
    ReadyFrame: st.builds(ReadyFrame, capabilities=CAPABILITIES),
    OutputFrame: st.builds(OutputFrame, output=OUTPUT, load=LOAD, num_pauses=U64),
    RefusedFrame: st.builds(RefusedFrame, sequence_id=TEXT, reason=TEXT),
    FatalFrame: st.builds(FatalFrame, reason=TEXT),
}


def test_no_frame_type_and_no_field_is_left_out():
    assert set(FRAMES) == set(get_args(Frame))
    # A field with a default that no strategy names would never differ from it.
    named = {
        SamplingParams: SAMPLING,
        SequenceSpec: SPEC,
        SequenceFinish: FINISH,
        StepOutput: OUTPUT,
        LoadReport: LOAD,
        Capabilities: CAPABILITIES,
    }
    for kind, strategy in named.items():
        assert set(strategy.wrapped_strategy.kwargs) == {field.name for field in fields(kind)}, kind
    assert {field.name for field in fields(Delta)} == {
        *("first", "token_ids", "texts", "prev_chain", "chain", "logprobs"),
    }


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(*FRAMES.values()), min_size=1, max_size=3))
def test_every_frame_comes_out_as_it_went_in(frames):
    out = list(FrameReader().feed(b"".join(map(encode_frame, frames))))
    assert out == frames
    assert repr(out) == repr(frames)  # equal values of another type (1 and True, an enum and its text) differ here
