"""The sampling part of the public request, field by field. Pure but for the protos it reads.

A `float` of the proto stands for the value of its 32 bits, widened and never rounded to a decimal: 0.8 is 0.800000011920929,
whichever language sent it. So is it checked, hashed, stored and used.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from inference.v1 import types_pb2
from service_kit.errors import InvalidArgumentError
from service_kit.sampling import MAX_LOGIT_BIAS, MAX_LOGIT_BIASES, InvalidSamplingError, SamplingParams

_PATH = "spec.sampling"
_NOT_KNOWN_YET = 1 << 32
"""Stands for the longest output until the prompt's length is known; above every value of the proto's field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSampling:
    """Checked parameters of a prompt whose length is not known yet. `max_output_tokens` and `seed` are None when unset."""

    params: SamplingParams
    max_output_tokens: int | None
    seed: int | None

    def complete(self, *, num_prompt_tokens: int, context_length: int) -> SamplingParams:
        """Parameters for this prompt. Raises InvalidArgumentError when prompt and output do not fit the context."""
        room = context_length - num_prompt_tokens
        sizes = {"context_length": str(context_length), "prompt_tokens": str(num_prompt_tokens)}
        for field, wanted in (
            ("max_output_tokens", self.max_output_tokens),
            ("min_output_tokens", self.params.min_output_tokens),
        ):
            if wanted is not None and wanted > room:
                raise InvalidArgumentError(
                    f"{_PATH}.{field}",
                    f"prompt ({num_prompt_tokens} tokens) and output do not fit the model's context of {context_length}",
                    metadata=sizes,
                )
        return self.params if self.max_output_tokens is not None else replace(self.params, max_output_tokens=room)


def parse_sampling(sampling: types_pb2.Sampling, *, vocab_size: int) -> DraftSampling:
    """Raises InvalidArgumentError with the path of the first bad field."""
    max_output_tokens = sampling.max_output_tokens if sampling.HasField("max_output_tokens") else None
    seed = sampling.seed if sampling.HasField("seed") else None
    logit_bias = _parse_biases(sampling.logit_bias, vocab_size)
    try:
        params = SamplingParams(
            max_output_tokens=_NOT_KNOWN_YET if max_output_tokens is None else max_output_tokens,
            min_output_tokens=sampling.min_output_tokens,
            temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
            top_k=sampling.top_k,
            top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=logit_bias,
            seed=seed or 0,
            stop=tuple(sampling.stop),
            stop_token_ids=tuple(sampling.stop_token_ids),
            include_stop=sampling.include_stop,
            ignore_eos=sampling.ignore_eos,
            logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        )
    except InvalidSamplingError as error:
        description = str(error).removeprefix(f"{error.field}: ")
        raise InvalidArgumentError(f"{_PATH}.{error.field}", description) from error
    for index, token_id in enumerate(params.stop_token_ids):
        _check_token_id(f"{_PATH}.stop_token_ids[{index}]", token_id, vocab_size)
    return DraftSampling(params=params, max_output_tokens=max_output_tokens, seed=seed)


def _parse_biases(biases: Iterable[types_pb2.LogitBias], vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Sorted by token id. Raises InvalidArgumentError naming the entry."""
    entries = list(biases)
    if len(entries) > MAX_LOGIT_BIASES:
        raise InvalidArgumentError(f"{_PATH}.logit_bias", f"at most {MAX_LOGIT_BIASES} tokens")
    bias_by_id: dict[int, float] = {}
    for index, entry in enumerate(entries):
        path = f"{_PATH}.logit_bias[{index}]"
        _check_token_id(f"{path}.token_id", entry.token_id, vocab_size)
        if entry.token_id in bias_by_id:
            raise InvalidArgumentError(f"{path}.token_id", f"token {entry.token_id} stands there twice")
        if not math.isfinite(entry.bias) or abs(entry.bias) > MAX_LOGIT_BIAS:
            raise InvalidArgumentError(
                f"{path}.bias", f"must be a number from -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
            )
        bias_by_id[entry.token_id] = entry.bias
    return tuple(sorted(bias_by_id.items()))


def _check_token_id(path: str, token_id: int, vocab_size: int) -> None:
    if token_id >= vocab_size:
        raise InvalidArgumentError(path, f"token ids of this model are below {vocab_size}")
