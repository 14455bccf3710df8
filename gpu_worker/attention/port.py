"""What the model runner, the models and an attention backend say to each other.

A step is one packed batch: the rows of all its sequences behind each other, a decode being a chunk of one row.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from gpu_worker.engine.sequence import BlockMoves


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRows:
    """The rows of one sequence in the packed batch."""

    first_row: int
    num_rows: int
    context_length: int
    """Tokens in KV memory after the step; the rows are its last `num_rows` positions."""
    block_table: tuple[int, ...]

    @property
    def end_row(self) -> int:
        return self.first_row + self.num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRule:
    """How a layer turns query · key into a score: s = `scale` * (query · key); with a `softcap` c, c * tanh(s / c).

    `window`: a row sees itself and the `window - 1` positions before it, None everything. What a row does not see is
    masked after the softcap. Layers of one rule share what a step prepares.
    """

    window: int | None
    scale: float
    softcap: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Heads and sizes of every layer, and what the KV memory holds.

    All layers have the same heads and sizes. Where a model's layers differ in them, each group of alike layers has a shape
    and a backend of its own, with layers counted from 0 within the group, and all have the same blocks
    (gpu_worker/attention/layered.py): a backend need not know.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int
    num_host_blocks: int = 0
    """Blocks of the host tier."""
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer: a row sees itself and the `window - 1` positions before it. None, or an empty tuple
    for all layers: everything."""
    scales: tuple[float | None, ...] = ()
    """Factor of each layer's products of query and key. None, or an empty tuple for all layers: 1 / sqrt(head_dim)."""
    softcaps: tuple[float | None, ...] = ()
    """Softcap of each layer's scores, as in ScoreRule. None, or an empty tuple for all layers: none."""

    @property
    def rules(self) -> tuple[ScoreRule, ...]:
        """Of each layer, with the defaults filled in."""
        default: tuple[None, ...] = (None,) * self.num_layers
        kinds = zip(self.windows or default, self.scales or default, self.softcaps or default, strict=True)
        rules = tuple(
            ScoreRule(window=window, scale=1 / math.sqrt(self.head_dim) if scale is None else scale, softcap=softcap)
            for window, scale, softcap in kinds
        )
        assert len(rules) == self.num_layers
        return rules


class StepAttention(Protocol):
    """Attention of one step; made once, called by every layer."""

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Stores `key` and `value` [T, kv_heads, head_dim] of the rows in the blocks of `layer`, then attends.

        `query` and the result are [T, heads, head_dim]. Row i sees its own sequence up to its own position and nothing
        else: what earlier holders left behind a sequence's end, NaN included, has no influence. A step may be repeated.
        """


class AttentionBackend(Protocol):
    """Owns the KV memory, whose layout is nobody else's business."""

    name: str
    is_batch_invariant: bool
    """Whether a row's result is the same bits however its sequence is cut into steps, whoever shares the batch, and
    however many threads there are."""

    def move(self, moves: BlockMoves) -> None:
        """Copies blocks of all layers, in the order of the fields. Returns when the sources may be overwritten."""

    def begin_step(self, rows: list[SequenceRows]) -> StepAttention:
        """Prepares what is the same in all layers: slots, gathers, masks. Changes nothing."""
