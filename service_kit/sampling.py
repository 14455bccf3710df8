"""Sampling parameters: one validated type, shared by gateway and engine. Pure."""

import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_TEMPERATURE = 100.0
MAX_TOP_K = 1 << 20
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
    """How the next token is chosen and when the output ends.

    temperature: 0 is greedy; otherwise logits are divided by it. top_k: 0 is off. top_p: 1 is off.
    seed: the random number of position i depends on (seed, i) alone. stop: the output ends before the first match.
    stop_token_ids: like EOS, not part of the output. ignore_eos: EOS tokens are ordinary tokens.
    """

    max_output_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_output_tokens < 1:
            raise InvalidSamplingError("max_output_tokens", "must be at least 1")
        if not math.isfinite(self.temperature) or not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise InvalidSamplingError("temperature", f"must be a number from 0 to {MAX_TEMPERATURE:g}")
        if not 0 <= self.top_k <= MAX_TOP_K:
            raise InvalidSamplingError("top_k", f"must be from 0 to {MAX_TOP_K}")
        if not math.isfinite(self.top_p) or not 0 < self.top_p <= 1:
            raise InvalidSamplingError("top_p", "must be above 0 and at most 1")
        if not 0 <= self.seed <= MAX_SEED:
            raise InvalidSamplingError("seed", f"must be from 0 to {MAX_SEED}")
        self._check_stops()

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
    def from_dict(cls, fields: dict[str, Any]) -> "SamplingParams":
        return cls(**{**fields, "stop": tuple(fields["stop"]), "stop_token_ids": tuple(fields["stop_token_ids"])})
