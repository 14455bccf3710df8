"""The scheduling state of one attempt, and the plain data of a step. Pure."""

from dataclasses import dataclass, field, replace
from enum import StrEnum

from service_kit.prefix_hash import BlockHash, PrefixRoot

NUM_CLASSES = 3
"""INTERACTIVE, STANDARD, BATCH; the lower number goes first."""
UNKNOWN_TOKEN = -1
"""Stands for the last token of a sequence while it is being drawn."""


class SequenceState(StrEnum):
    """Where a sequence stands with the step scheduler."""

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    PREEMPTED = "PREEMPTED"
    """Waiting again after its blocks were taken; it keeps its place."""
    FINISHED = "FINISHED"


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One attempt; mutable, owned by the StepScheduler.

    There are no phases: a step computes some of the tokens between `num_computed_tokens` and the end of `token_ids`, and
    when it reaches the end, the last row is sampled and `token_ids` grows by one.
    """

    sequence_id: str
    token_ids: list[int]
    """Prompt, output of earlier attempts, and what was sampled since."""
    num_prompt_tokens: int
    max_total_tokens: int
    """Prompt and all output tokens, at most."""
    priority: int
    arrival: int = 0
    state: SequenceState = SequenceState.WAITING
    num_computed_tokens: int = 0
    """Tokens whose KV stands in the blocks."""
    num_cached_tokens: int = 0
    """Of these, tokens that were found in the prefix cache at the first admission."""
    block_table: list[int] = field(default_factory=list)
    """Append-only until the blocks are given back: block i holds tokens i * block_size and following."""
    prefix_root: PrefixRoot | None = None
    """Key of its block hashes; None shares no block with any other sequence."""
    block_hashes: list[BlockHash] = field(default_factory=list)
    """Hashes of its first full blocks, each computed once. Those behind num_published_blocks are being computed."""
    num_published_blocks: int = 0
    """Of the block table, blocks whose content was offered to the prefix cache or came from it."""
    num_admitted_tokens: int = 0
    """Tokens it had when it last got blocks; what it computes up to there fills the cache."""
    awaited_hash: BlockHash | None = None
    """While it waits for a block that a running sequence computes: that block's hash."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Only its newest token is missing from the KV memory."""
        return len(self.token_ids) - self.num_computed_tokens == 1

    @property
    def is_full(self) -> bool:
        """Its last token is being drawn: nothing is left to compute."""
        return self.token_ids[-1] == UNKNOWN_TOKEN and len(self.token_ids) >= self.max_total_tokens

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: class first, then arrival, so that a preempted sequence keeps its place. Changes only while it waits."""
        return (self.priority, self.arrival)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSequence:
    """What a step computes of one sequence: `token_ids`, which stand at positions from `start` on."""

    sequence_id: str
    start: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    """Enough blocks for every token up to the end of this step."""
    is_sampled: bool
    """Whether the last row reaches the end of the sequence, so that the next token is drawn from it."""
    num_drafts: int = 0
    """The last so many `token_ids` are only proposed; a token is drawn from each of their rows and from the one before."""

    @property
    def context_length(self) -> int:
        """Tokens in KV memory after the step, proposed ones included."""
        return self.start + len(self.token_ids)

    @property
    def num_sampled_rows(self) -> int:
        """Rows, the last ones, from which a token is drawn."""
        return self.num_drafts + 1 if self.is_sampled else 0

    @property
    def draft_token_ids(self) -> tuple[int, ...]:
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    def without_drafts(self) -> "PlannedSequence":
        """The same without what is only proposed."""
        return replace(self, token_ids=self.token_ids[: len(self.token_ids) - self.num_drafts], num_drafts=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMoves:
    """Copies of whole blocks, all layers, due once before the step computes, in the order of the fields."""

    to_host: tuple[tuple[int, int], ...] = ()
    """(block, host block)"""
    from_host: tuple[tuple[int, int], ...] = ()
    """(host block, block)"""
    duplicated: tuple[tuple[int, int], ...] = ()
    """(block, block that becomes its copy)"""

    def __bool__(self) -> bool:
        return bool(self.to_host or self.from_host or self.duplicated)


NO_MOVES = BlockMoves()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step over the batch: plain data, so that it can be logged, compared and replayed."""

    sequences: tuple[PlannedSequence, ...]
    preempted: tuple[str, ...] = ()
    """Sequences that lost their blocks while this plan was made."""
    moves: BlockMoves = NO_MOVES

    @property
    def num_tokens(self) -> int:
        return sum(len(planned.token_ids) for planned in self.sequences)

    def only(self, sequence_id: str) -> "StepPlan":
        """The same computation for one of its sequences; the moves are done already."""
        return StepPlan(sequences=tuple(planned for planned in self.sequences if planned.sequence_id == sequence_id))
