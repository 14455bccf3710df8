"""Sampling parameters on the internal wire; every field is set there."""

from inference.internal.v1 import worker_pb2
from service_kit.errors import InvalidArgumentError
from service_kit.sampling import InvalidSamplingError, SamplingParams


def encode_sampling(sampling: SamplingParams) -> worker_pb2.SamplingParams:
    return worker_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        max_output_tokens=sampling.max_output_tokens,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
    )


def decode_sampling(message: worker_pb2.SamplingParams, *, field: str) -> SamplingParams:
    """Raises InvalidArgumentError; `field` is the path of the message in its request."""
    try:
        return SamplingParams(
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p,
            seed=message.seed,
            max_output_tokens=message.max_output_tokens,
            stop=tuple(message.stop),
            stop_token_ids=tuple(message.stop_token_ids),
            ignore_eos=message.ignore_eos,
        )
    except InvalidSamplingError as error:
        raise InvalidArgumentError(f"{field}.{error.field}", str(error)) from error
