"""How the simulated engine is set up. Pure."""

from dataclasses import dataclass

from gpu_worker.engine.simulated_tokens import TokenMode

SIMULATED_PRECISION = "sim"


class InvalidSettingsError(ValueError):
    """A setting outside its range, or a model that the simulated engine cannot speak for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSettings:
    """Speed, size and behaviour. Rates are per sequence for decoding, per engine for prefill; 0 is as fast as possible."""

    tokens_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    num_blocks: int = 4096
    block_size: int = 16
    max_running: int = 64
    step_tokens: int = 2048
    """Most tokens one step computes; longer prompts are prefilled in chunks."""
    token_mode: TokenMode = TokenMode.PROMPT_HASH
    eos_one_in: int = 0
    """About one in so many tokens is EOS; 0 is never."""
    has_prompt_faults: bool = False
    """Whether fault markers in prompts are obeyed."""
    has_prefix_cache: bool = True
    """Whether blocks of equal prefix and salt are computed once, as long as memory keeps them."""
    load_s: float = 0.0
    """How long loading takes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_mode", TokenMode(self.token_mode))
        for name in ("num_blocks", "block_size", "max_running", "step_tokens"):
            if getattr(self, name) < 1:
                raise InvalidSettingsError(f"{name}: must be at least 1")
        for name in ("tokens_per_s", "prefill_tokens_per_s", "eos_one_in", "load_s"):
            if getattr(self, name) < 0:
                raise InvalidSettingsError(f"{name}: must not be negative")
        if self.step_tokens < self.max_running:
            raise InvalidSettingsError("step_tokens: must be at least max_running")
