"""Builds what an engine speculates with."""

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.engine.execution import Executor
from gpu_worker.engine.port import Capabilities
from gpu_worker.engine.settings import EngineStartError
from gpu_worker.engine.text import TokenTable
from gpu_worker.speculation.draft_model import DraftModelProposer
from gpu_worker.speculation.ngram import NgramProposer
from gpu_worker.speculation.proposer import Proposer
from gpu_worker.speculation.row_cost import RowCost
from gpu_worker.speculation.row_seconds import measure_rows
from gpu_worker.speculation.settings import SpeculationSettings
from gpu_worker.speculation.speculator import Speculator

LoadedDraft = tuple[Executor, Capabilities, TokenTable]
LoadDraft = Callable[[], LoadedDraft]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftParts:
    """A loaded draft model, and the seconds of its steps by their rows."""

    executor: Executor
    capabilities: Capabilities
    row_seconds: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParts:
    """Implements Speculation. What the speculators of one loaded model are made of; `draft` None for looking up. row_seconds: of the target."""

    max_draft_tokens: int
    row_seconds: tuple[tuple[int, float], ...]
    draft: DraftParts | None = None

    def drafts(self) -> Speculator:
        """A new one that has learned nothing yet."""
        return Speculator(self._proposer(), RowCost(self.row_seconds), max_draft_tokens=self.max_draft_tokens)

    def _proposer(self) -> Proposer:
        if self.draft is None:
            return NgramProposer()
        capabilities = self.draft.capabilities
        return DraftModelProposer(
            self.draft.executor,
            pool=BlockPool(num_blocks=capabilities.num_blocks, block_size=capabilities.block_size),
            context_length=capabilities.context_length,
            cost=RowCost(self.draft.row_seconds),
        )


def load_speculation(
    settings: SpeculationSettings,
    *,
    executor: Executor,
    capabilities: Capabilities,
    table: TokenTable,
    load_draft: LoadDraft,
) -> SpeculationParts | None:
    """None when nothing is to be proposed. Raises EngineStartError, and what `load_draft` raises.

    Where the target's logits depend on the batch, proposals would change which of two almost equal tokens is drawn, so
    "auto" proposes nothing there.
    """
    mode = settings.mode
    if mode == "auto":
        mode = "draft" if settings.draft_model else "ngram" if capabilities.is_batch_invariant else "off"
    if mode == "off":
        return None
    draft = _check_draft(*_loaded(load_draft), capabilities=capabilities, table=table) if mode == "draft" else None
    row_seconds = _measure(executor, capabilities)
    log.info("speculation", mode=mode, row_ms={rows: round(1000 * seconds, 2) for rows, seconds in row_seconds})
    return SpeculationParts(max_draft_tokens=settings.max_draft_tokens, row_seconds=row_seconds, draft=draft)


def _loaded(load_draft: LoadDraft) -> LoadedDraft:
    """What cannot be had is told of the draft model and not of the target."""
    try:
        return load_draft()
    except EngineStartError as error:
        raise EngineStartError(f"draft_model: {error}") from error


def _check_draft(
    executor: Executor, draft: Capabilities, draft_table: TokenTable, *, capabilities: Capabilities, table: TokenTable
) -> DraftParts:
    """Raises EngineStartError unless the draft model speaks in the target's tokens."""
    if draft.vocab_size != capabilities.vocab_size:
        raise EngineStartError(
            f"draft_model: {draft.model} has a vocabulary of {draft.vocab_size}, "
            f"{capabilities.model} one of {capabilities.vocab_size}"
        )
    different = next((i for i in range(draft.vocab_size) if draft_table.bytes_of(i) != table.bytes_of(i)), None)
    if different is not None:
        raise EngineStartError(f"draft_model: token {different} of {draft.model} is another one than the model's")
    return DraftParts(executor=executor, capabilities=draft, row_seconds=_measure(executor, draft))


def _measure(executor: Executor, capabilities: Capabilities) -> tuple[tuple[int, float], ...]:
    most = min(capabilities.context_length, capabilities.num_blocks * capabilities.block_size)
    return measure_rows(executor, most=most, block_size=capabilities.block_size)
