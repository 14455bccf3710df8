"""The bounds of a step. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Bounds of one step.

    max_running: sequences that hold blocks. token_budget: tokens computed per step, at least max_running so that a full
    batch decodes in one step. A prefill of more than long_prefill_tokens is long: at most max_long_prefills are taken in
    at a time (those of lower classes do not count), and each gets more than long_prefill_tokens of a step only when nobody else wants the rest.

    target_step_s: prefill and admission are bounded so that a step is predicted to take no longer; None for no target.
    A step with a prefill computes at least min_prefill_tokens of it, whatever the target.

    initial_growth_ratio, min_growth_ratio: share of its remaining output that is kept free for each running sequence
    when another is taken in; see `admission.GrowthRatio`.
    """

    max_running: int
    token_budget: int
    max_long_prefills: int
    long_prefill_tokens: int
    target_step_s: float | None = None
    min_prefill_tokens: int = 16
    initial_growth_ratio: float = 0.5
    min_growth_ratio: float = 0.05

    def __post_init__(self) -> None:
        for name in ("max_running", "max_long_prefills", "long_prefill_tokens", "min_prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.token_budget < self.max_running:
            raise ValueError("token_budget must be at least max_running")
        if self.target_step_s is not None and not self.target_step_s > 0:
            raise ValueError("target_step_s must be above 0")
        if not 0 <= self.min_growth_ratio <= self.initial_growth_ratio <= 1:
            raise ValueError("growth ratios must satisfy 0 <= min_growth_ratio <= initial_growth_ratio <= 1")

    def is_long(self, num_tokens: int) -> bool:
        """Whether a prefill of so many tokens is long."""
        return num_tokens > self.long_prefill_tokens
