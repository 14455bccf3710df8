"""How an engine speculates. Pure."""

from dataclasses import dataclass

MODES = ("auto", "off", "ngram", "draft")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSettings:
    """mode: "ngram" looks up what followed the newest tokens before, "draft" asks the model in the directory `draft_model`;
    "auto" is "draft" with one and otherwise "ngram", but "off" where the model's logits depend on the batch.

    max_draft_tokens: most proposed tokens of a sequence in a step. draft_memory_share: share of the available memory for
    the draft model's KV blocks.
    """

    mode: str = "auto"
    max_draft_tokens: int = 7
    draft_model: str | None = None
    draft_memory_share: float = 0.05

    def __post_init__(self) -> None:
        """Raises ValueError that names the setting."""
        if self.mode not in MODES:
            raise ValueError(f"speculation {self.mode!r} is not one of {MODES}")
        if self.max_draft_tokens < 1:
            raise ValueError("max_draft_tokens must be at least 1")
        if self.mode == "draft" and not self.draft_model:
            raise ValueError("speculation 'draft' needs a draft_model")
        if self.mode in {"off", "ngram"} and self.draft_model:
            raise ValueError(f"draft_model is of no use with speculation {self.mode!r}")
        if not 0 < self.draft_memory_share <= 1:
            raise ValueError("draft_memory_share must be above 0 and at most 1")
