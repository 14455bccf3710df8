"""Sampling parameters and log probabilities on the internal wire; every field is set there."""

from collections.abc import Iterable

from inference.internal.v1 import worker_pb2
from service_kit.delta import TokenLogprob
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
        min_output_tokens=sampling.min_output_tokens,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=[worker_pb2.LogitBias(token_id=token_id, bias=bias) for token_id, bias in sampling.logit_bias],
        include_stop=sampling.include_stop,
        logprobs=sampling.logprobs,
    )


def decode_sampling(message: worker_pb2.SamplingParams, *, field: str) -> SamplingParams:
    """Raises InvalidArgumentError; `field` is the path of the message in its request.

    A sender of an older version sets no repetition penalty, and 0 is none: it is off then.
    """
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
            min_output_tokens=message.min_output_tokens,
            min_p=message.min_p,
            repetition_penalty=message.repetition_penalty or 1.0,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            logit_bias=tuple((each.token_id, each.bias) for each in message.logit_bias),
            include_stop=message.include_stop,
            logprobs=message.logprobs if message.HasField("logprobs") else None,
        )
    except InvalidSamplingError as error:
        raise InvalidArgumentError(f"{field}.{error.field}", str(error)) from error


def encode_logprobs(logprobs: Iterable[TokenLogprob]) -> list[worker_pb2.TokenLogprob]:
    return [
        worker_pb2.TokenLogprob(
            logprob=each.logprob,
            top_token_ids=[token_id for token_id, _ in each.top],
            top_logprobs=[logprob for _, logprob in each.top],
        )
        for each in logprobs
    ]


def decode_logprobs(messages: Iterable[worker_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    """Raises ValueError when ids and log probabilities of one position differ in number."""
    return tuple(
        TokenLogprob(message.logprob, tuple(zip(message.top_token_ids, message.top_logprobs, strict=True)))
        for message in messages
    )
