import struct
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.internal.v1 import worker_pb2
from service_kit.delta import TokenLogprob
from service_kit.errors import InvalidArgumentError
from service_kit.logprob_codec import pack_logprobs, unpack_logprobs
from service_kit.sampling import SamplingParams
from service_kit.sampling_codec import decode_logprobs, decode_sampling, encode_logprobs, encode_sampling

EVERYTHING = SamplingParams(
    max_output_tokens=9,
    min_output_tokens=3,
    temperature=0.1,
    top_k=4,
    top_p=0.9,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=-0.3,
    frequency_penalty=0.7,
    logit_bias=((0, -100.0), (7, 0.1)),
    seed=(1 << 63) - 1,
    stop=("끝",),
    stop_token_ids=(5, 6),
    include_stop=True,
    ignore_eos=True,
    logprobs=0,
)


def as_float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


float32s = st.floats(width=32, allow_nan=False, max_value=0)
logprobs = st.builds(
    TokenLogprob,
    float32s,
    st.lists(st.tuples(st.integers(0, 2**32 - 1), float32s), max_size=20).map(tuple),
)


def test_every_sampling_field_differs_from_its_default_here() -> None:
    default = SamplingParams(max_output_tokens=1)
    same = [each.name for each in fields(default) if getattr(default, each.name) == getattr(EVERYTHING, each.name)]
    assert same == []


@pytest.mark.parametrize("sampling", [EVERYTHING, SamplingParams(max_output_tokens=1)])
def test_sampling_crosses_the_internal_wire_exactly(sampling: SamplingParams) -> None:
    message = worker_pb2.SamplingParams.FromString(encode_sampling(sampling).SerializeToString())
    assert decode_sampling(message, field="sampling") == sampling


def test_a_sender_without_penalties_means_none() -> None:
    message = worker_pb2.SamplingParams(temperature=1, top_p=1, max_output_tokens=2)
    assert decode_sampling(message, field="sampling") == SamplingParams(max_output_tokens=2)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"min_output_tokens": 10}, "min_output_tokens"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"logit_bias": [worker_pb2.LogitBias(token_id=1, bias=float("inf"))]}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_a_bad_field_is_named_with_its_path(change: dict[str, object], field: str) -> None:
    message = worker_pb2.SamplingParams(temperature=1, top_p=1, max_output_tokens=2)
    message.MergeFrom(worker_pb2.SamplingParams(**change))
    with pytest.raises(InvalidArgumentError) as caught:
        decode_sampling(message, field="sampling")
    assert [violation.field for violation in caught.value.violations] == [f"sampling.{field}"]


@given(st.lists(logprobs, max_size=5).map(tuple))
def test_log_probabilities_come_back_bit_by_bit(given_logprobs: tuple[TokenLogprob, ...]) -> None:
    assert unpack_logprobs(pack_logprobs(given_logprobs)) == given_logprobs
    wire = worker_pb2.AttemptDelta(logprobs=encode_logprobs(given_logprobs)).SerializeToString()
    assert decode_logprobs(worker_pb2.AttemptDelta.FromString(wire).logprobs) == given_logprobs


def test_twenty_alternatives_take_less_than_two_hundred_bytes() -> None:
    top = tuple((49_000 + rank, as_float32(-0.1 * rank)) for rank in range(20))
    assert len(pack_logprobs([TokenLogprob(as_float32(-0.1), top)])) < 200


@pytest.mark.parametrize("packed", [b"\x91\x92\xca\x00\x00\x00\x00\x07", b"\xc1", b"\x91\x90", b""])
def test_bytes_that_hold_no_log_probabilities_are_refused(packed: bytes) -> None:
    with pytest.raises((ValueError, IndexError)):
        unpack_logprobs(packed)


def test_a_position_whose_ids_and_values_differ_in_number_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        decode_logprobs([worker_pb2.TokenLogprob(top_token_ids=[1, 2], top_logprobs=[0.0])])
