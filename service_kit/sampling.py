"""Sampling parameters: one validated type, shared by gateway and engine. Pure."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_TEMPERATURE = 100.0
MAX_TOP_K = 1 << 20
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 10.0
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_TOP_LOGPROBS = 20
MAX_SEED = (1 << 63) - 1


class FinishReason(StrEnum):
    """Why an output ended. Failures are a status, not a finish reason."""

    STOP = "STOP"
    LENGTH = "LENGTH"
    CANCELLED = "CANCELLED"


class InvalidSamplingError(ValueError):
    """A parameter outside its range; `field` names it as the public API does."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when the output ends. Applied in this order: bias, penalties, temperature, top-k,
    top-p, min-p.

    logit_bias: (token id, what is added to its logit), sorted by id, each id once.
    repetition_penalty: logits of tokens of the prompt or the output are divided by it when positive, multiplied when
    negative (arXiv:1909.05858); 1 is off. presence_penalty is subtracted from the logit of every token of the output,
    frequency_penalty as often as it stands there; the prompt does not count for these two.
    temperature: 0 is greedy; otherwise logits are divided by it. top_k: 0 is off. top_p: 1 is off. min_p: tokens less
    probable than this share of the most probable one's probability are left out (arXiv:2407.01082); 0 is off.
    seed: the random number of position i depends on (seed, i) alone.
    stop: the output ends before the first match, or behind it with include_stop. stop_token_ids: like EOS, not part of the
    output. ignore_eos: EOS tokens are ordinary tokens.
    min_output_tokens: end tokens are not drawn, and stop strings do not match, before so many tokens.
    logprobs: None is off; n gives the chosen token's log probability and the n most probable tokens at each position, of
    the model's own distribution, before anything above changes it.
    """

    max_output_tokens: int
    min_output_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_lengths()
        self._check_number("temperature", lowest=0, highest=MAX_TEMPERATURE)
        if not 0 <= self.top_k <= MAX_TOP_K:
            raise InvalidSamplingError("top_k", f"must be from 0 to {MAX_TOP_K}")
        if not math.isfinite(self.top_p) or not 0 < self.top_p <= 1:
            raise InvalidSamplingError("top_p", "must be above 0 and at most 1")
        self._check_number("min_p", lowest=0, highest=1)
        if not math.isfinite(self.repetition_penalty) or not 0 < self.repetition_penalty <= MAX_REPETITION_PENALTY:
            raise InvalidSamplingError("repetition_penalty", f"must be above 0 and at most {MAX_REPETITION_PENALTY:g}")
        self._check_number("presence_penalty", lowest=-MAX_PENALTY, highest=MAX_PENALTY)
        self._check_number("frequency_penalty", lowest=-MAX_PENALTY, highest=MAX_PENALTY)
        self._check_biases()
        if not 0 <= self.seed <= MAX_SEED:
            raise InvalidSamplingError("seed", f"must be from 0 to {MAX_SEED}")
        self._check_stops()
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise InvalidSamplingError("logprobs", f"must be from 0 to {MAX_TOP_LOGPROBS}")

    @property
    def has_penalties(self) -> bool:
        """Whether what was output (or prompted) changes later logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def _check_lengths(self) -> None:
        if self.max_output_tokens < 1:
            raise InvalidSamplingError("max_output_tokens", "must be at least 1")
        if not 0 <= self.min_output_tokens <= self.max_output_tokens:
            raise InvalidSamplingError("min_output_tokens", "must be from 0 to max_output_tokens")

    def _check_number(self, field: str, *, lowest: float, highest: float) -> None:
        value = getattr(self, field)
        if not math.isfinite(value) or not lowest <= value <= highest:
            raise InvalidSamplingError(field, f"must be a number from {lowest:g} to {highest:g}")

    def _check_biases(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise InvalidSamplingError("logit_bias", f"at most {MAX_LOGIT_BIASES} tokens")
        ids = [token_id for token_id, _ in self.logit_bias]
        if any(token_id < 0 for token_id in ids) or any(left >= right for left, right in pairwise(ids)):
            raise InvalidSamplingError("logit_bias", "token ids are not negative, sorted, and each stands once")
        if not all(math.isfinite(bias) and abs(bias) <= MAX_LOGIT_BIAS for _, bias in self.logit_bias):
            raise InvalidSamplingError(
                "logit_bias", f"a bias is a number from -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
            )

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidSamplingError("stop", f"at most {MAX_STOP_STRINGS} stop strings")
        for text in self.stop:
            if not text or len(text) > MAX_STOP_STRING_CHARS or "\x00" in text:
                raise InvalidSamplingError(
                    "stop", f"a stop string has 1 to {MAX_STOP_STRING_CHARS} characters, none of them NUL"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS or any(token_id < 0 for token_id in self.stop_token_ids):
            raise InvalidSamplingError("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids, none negative")

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, as stored with the generation and sent to the engine."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "SamplingParams":
        """From `to_dict`'s form; a field that an older form lacks has its default."""
        biases = tuple((token_id, bias) for token_id, bias in fields.get("logit_bias", ()))
        stops = {name: tuple(fields[name]) for name in ("stop", "stop_token_ids")}
        return cls(**{**fields, **stops, "logit_bias": biases})
