"""How an engine is set up. Pure."""

from dataclasses import dataclass

from gpu_worker.engine.step_limits import StepLimits
from gpu_worker.speculation.settings import SpeculationSettings

PRECISION_BY_DTYPE = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
INT8_PRECISION = "int8"
"""Of a model whose weights were quantized: int8 products, everything else in fp32."""


class EngineStartError(Exception):
    """The engine cannot start with this model, these settings and this machine; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Sizes and placement of a native engine.

    threads: None takes what affinity and control group allow. num_blocks: None takes `memory_share` of the available
    memory, but not more than max_running sequences of full length need; on a CUDA device it takes what weights and the
    largest step leave of device_memory_share of the whole. num_host_blocks: blocks of the host tier, 0 for
    none. target_step_ms: prefill and admission are bounded so that a step takes about no longer, and streams beside a long
    prompt go on twice a second; None for no bound. kv_dtype: what keys and values are stored as, None for dtype; all
    workers of a model need the same, because it changes the last bits of logits. speculation, max_draft_tokens,
    draft_model, draft_memory_share: as in SpeculationSettings. Other limits as in StepLimits.
    """

    threads: int | None = None
    num_blocks: int | None = None
    num_host_blocks: int = 0
    memory_share: float = 0.3
    device_memory_share: float = 0.9
    block_size: int = 16
    max_running: int = 64
    token_budget: int = 512
    max_long_prefills: int = 2
    long_prefill_tokens: int = 256
    target_step_ms: float | None = 500.0
    device: str = "cpu"
    dtype: str = "float32"
    kv_dtype: str | None = None
    speculation: str = "auto"
    max_draft_tokens: int = 7
    draft_model: str | None = None
    draft_memory_share: float = 0.05

    def __post_init__(self) -> None:
        for name in ("threads", "num_blocks", "block_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise EngineStartError(f"{name} must be at least 1")
        if self.num_host_blocks < 0:
            raise EngineStartError("num_host_blocks must not be negative")
        for name in ("memory_share", "device_memory_share"):
            if not 0 < getattr(self, name) <= 1:
                raise EngineStartError(f"{name} must be above 0 and at most 1")
        if self.dtype not in PRECISION_BY_DTYPE:
            raise EngineStartError(f"dtype {self.dtype!r} is not one of {sorted(PRECISION_BY_DTYPE)}")
        if self.kv_dtype is not None and self.kv_dtype not in PRECISION_BY_DTYPE:
            raise EngineStartError(f"kv_dtype {self.kv_dtype!r} is not one of {sorted(PRECISION_BY_DTYPE)}")
        try:
            self.step_limits()
            self.drafting()
        except ValueError as error:
            raise EngineStartError(str(error)) from error

    def drafting(self) -> SpeculationSettings:
        return SpeculationSettings(
            mode=self.speculation,
            max_draft_tokens=self.max_draft_tokens,
            draft_model=self.draft_model,
            draft_memory_share=self.draft_memory_share,
        )

    def step_limits(self) -> StepLimits:
        return StepLimits(
            max_running=self.max_running,
            token_budget=self.token_budget,
            max_long_prefills=self.max_long_prefills,
            long_prefill_tokens=self.long_prefill_tokens,
            target_step_s=None if self.target_step_ms is None else self.target_step_ms / 1000,
        )
