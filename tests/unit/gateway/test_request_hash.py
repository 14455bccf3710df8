import pytest

from gateway.request_hash import request_hash
from inference.v1 import types_pb2


def base() -> types_pb2.GenerationSpec:
    return types_pb2.GenerationSpec(
        model="m",
        chat=types_pb2.Chat(messages=[types_pb2.ChatMessage(role="user", content="hi")]),
        sampling=types_pb2.Sampling(temperature=0.5, stop=["a", "b"], stop_token_ids=[3]),
    )


CHANGES = [
    lambda spec: setattr(spec, "model", "n"),
    lambda spec: setattr(spec, "prompt", "hi"),
    lambda spec: setattr(spec.chat.messages[0], "content", "ho"),
    lambda spec: spec.chat.messages.add(role="user", content="hi"),
    lambda spec: setattr(spec.sampling, "temperature", 0.25),
    lambda spec: setattr(spec.sampling, "top_k", 0),
    lambda spec: setattr(spec.sampling, "top_p", 1.0),
    lambda spec: setattr(spec.sampling, "seed", 0),
    lambda spec: setattr(spec.sampling, "ignore_eos", True),
    lambda spec: spec.sampling.stop.reverse(),
    lambda spec: spec.sampling.stop_token_ids.append(3),
    lambda spec: setattr(spec.sampling, "min_output_tokens", 0),
    lambda spec: setattr(spec.sampling, "min_p", 0.0),
    lambda spec: setattr(spec.sampling, "repetition_penalty", 1.0),
    lambda spec: setattr(spec.sampling, "presence_penalty", 0.0),
    lambda spec: setattr(spec.sampling, "frequency_penalty", 0.0),
    lambda spec: spec.sampling.logit_bias.add(token_id=3),
    lambda spec: setattr(spec.sampling, "include_stop", True),
    lambda spec: setattr(spec.sampling, "logprobs", 0),
    lambda spec: setattr(spec, "priority_class", types_pb2.PRIORITY_CLASS_STANDARD),
]


@pytest.mark.parametrize("change", CHANGES)
def test_any_difference_in_the_spec_is_another_request(change) -> None:
    changed = base()
    change(changed)
    assert request_hash(changed) != request_hash(base())


def test_the_hash_is_32_bytes_and_survives_the_wire() -> None:
    again = types_pb2.GenerationSpec.FromString(base().SerializeToString())
    assert request_hash(again) == request_hash(base())
    assert len(request_hash(base())) == 32


def test_fields_that_this_version_does_not_know_do_not_count() -> None:
    unknown = base().SerializeToString() + b"\xfa\x3f\x03abc"
    parsed = types_pb2.GenerationSpec.FromString(unknown)
    assert parsed.SerializeToString() != base().SerializeToString()
    assert request_hash(parsed) == request_hash(base())


def test_where_a_text_ends_counts() -> None:
    one = types_pb2.GenerationSpec(sampling=types_pb2.Sampling(stop=["ab", "c"]))
    other = types_pb2.GenerationSpec(sampling=types_pb2.Sampling(stop=["a", "bc"]))
    assert request_hash(one) != request_hash(other)


def biased(*biases: tuple[int, float]) -> types_pb2.GenerationSpec:
    spec = base()
    for token_id, bias in biases:
        spec.sampling.logit_bias.add(token_id=token_id, bias=bias)
    return spec


def test_biases_from_a_map_count_the_same_in_any_order() -> None:
    assert request_hash(biased((9, 1.5), (3, -0.0))) == request_hash(biased((3, 0.0), (9, 1.5)))
    assert request_hash(biased((9, 1.5), (3, 0.5))) != request_hash(biased((9, 0.5), (3, 1.5)))


def test_a_number_counts_as_its_32_bits() -> None:
    decimal, widened, other = base(), base(), base()
    decimal.sampling.min_p = 0.8
    widened.sampling.min_p = 0.800000011920929
    other.sampling.min_p = 0.80000007
    assert request_hash(decimal) == request_hash(widened)
    assert request_hash(decimal) != request_hash(other)


def test_the_hash_stays_the_same_between_releases() -> None:
    """A rolling upgrade must not turn a retry into a conflict."""
    assert request_hash(base()).hex() == "8159bf6a819f7944cb0b958e928d66704a112bd37889128e477dde6ffa487f96"
    later = biased((9, 1.5), (3, -0.25))
    later.sampling.MergeFrom(types_pb2.Sampling(min_p=0.1, presence_penalty=-0.5, logprobs=2, include_stop=True))
    assert request_hash(later).hex() == "dfb889a717062deec656b5322b8367f10c8ff513ac7dd8f0a283f1364bd596c0"
