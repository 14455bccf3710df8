"""Paged attention in plain torch, on any device: gather the blocks, then scaled_dot_product_attention.

Every other backend is measured against this one.
"""

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from gpu_worker.attention.memory import zeros
from gpu_worker.attention.port import AttentionShape, ScoreRule, SequenceRows
from gpu_worker.engine.sequence import BlockMoves


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Sequences attended together: S of them with Q rows each, their contexts padded to L slots.

    rows: packed row numbers [S * Q]. blocks: padded block tables, flat [S * L / block_size].
    masks: which slots a row sees under each window, [S, 1, Q * heads per KV head, L].
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    masks: dict[int | None, torch.Tensor]
    num_sequences: int


class ReferenceAttention:
    """Implements AttentionBackend. Keys and values, [num_layers, num_blocks + 1, block_size, kv_heads, head_dim] each.

    Every slot that is gathered holds numbers, because a masked slot has weight zero, but zero times NaN is NaN: the last
    block, which pads block tables, stays zero, and the slots behind a sequence's end in its last block are zeroed.
    """

    name = "reference"
    is_batch_invariant = False

    def __init__(self, shape: AttentionShape, *, device: torch.device, dtype: torch.dtype) -> None:
        """Keys and values are stored as `dtype`, and read as the type of the queries."""
        self.shape = shape
        self.device = device
        self.rules = shape.rules
        block = (shape.block_size, shape.num_kv_heads, shape.head_dim)
        size = (shape.num_layers, shape.num_blocks + 1, *block)
        self.keys, self.values = zeros(size, device=device, dtype=dtype), zeros(size, device=device, dtype=dtype)
        size, host = (shape.num_layers, shape.num_host_blocks, *block), torch.device("cpu")
        self.host_keys, self.host_values = zeros(size, device=host, dtype=dtype), zeros(size, device=host, dtype=dtype)

    def move(self, moves: BlockMoves) -> None:
        for memory, host in ((self.keys, self.host_keys), (self.values, self.host_values)):
            for pairs, source, target in (
                (moves.to_host, memory, host),
                (moves.from_host, host, memory),
                (moves.duplicated, memory, memory),
            ):
                for block, copy in pairs:
                    target[:, copy].copy_(source[:, block])

    def begin_step(self, rows: list[SequenceRows]) -> "ReferenceStep":
        slots = [self._slots(sequence, sequence.context_length - sequence.num_rows) for sequence in rows]
        return ReferenceStep(
            backend=self,
            slots=torch.cat(slots).to(self.device),
            empty_slots=torch.cat([self._empty_slots(sequence) for sequence in rows]).to(self.device),
            groups=[self._make_group(members) for members in _group(rows, self.shape.block_size)],
        )

    def _empty_slots(self, sequence: SequenceRows) -> torch.Tensor:
        """The slots behind the sequence's end in its last block."""
        block_size = self.shape.block_size
        last_block, num_filled = divmod(sequence.context_length - 1, block_size)
        first_slot = sequence.block_table[last_block] * block_size
        return torch.arange(first_slot + num_filled + 1, first_slot + block_size)

    def _slots(self, sequence: SequenceRows, first_position: int) -> torch.Tensor:
        """Slots from a position to the end: block times block_size plus offset."""
        positions = torch.arange(first_position, sequence.context_length)
        table = torch.tensor(sequence.block_table, dtype=torch.int64)
        block_size = self.shape.block_size
        return table[positions // block_size] * block_size + positions % block_size

    def _make_group(self, members: list[SequenceRows]) -> _Group:
        num_rows = members[0].num_rows
        heads_per_kv_head = self.shape.num_heads // self.shape.num_kv_heads
        widths = [-(-member.context_length // self.shape.block_size) for member in members]
        padding = (self.shape.num_blocks,) * max(widths)
        tables = [
            (member.block_table[:width] + padding)[: max(widths)] for member, width in zip(members, widths, strict=True)
        ]
        first_positions = torch.tensor([member.context_length - num_rows for member in members])
        positions = first_positions[:, None] + torch.arange(num_rows)
        slots = torch.arange(max(widths) * self.shape.block_size)
        masks = {window: _mask(slots, positions, window) for window in {rule.window for rule in self.rules}}
        first_rows = torch.tensor([member.first_row for member in members])
        return _Group(
            rows=(first_rows[:, None] + torch.arange(num_rows)).flatten().to(self.device),
            blocks=torch.tensor(tables, dtype=torch.int64).flatten().to(self.device),
            masks={
                window: mask[:, None].repeat(1, 1, heads_per_kv_head, 1).to(self.device)
                for window, mask in masks.items()
            },
            num_sequences=len(members),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceStep:
    """Implements StepAttention."""

    backend: ReferenceAttention
    slots: torch.Tensor
    empty_slots: torch.Tensor
    groups: list[_Group]

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        for memory, rows in ((self.backend.keys, key), (self.backend.values, value)):
            slots = memory[layer].flatten(0, 1)
            slots.index_fill_(0, self.empty_slots, 0)
            slots.index_copy_(0, self.slots, rows.to(slots.dtype))
        output = query.new_empty(query.shape)
        for group in self.groups:
            output.index_copy_(0, group.rows, self._attend(layer, group, query))
        return output

    def _attend(self, layer: int, group: _Group, query: torch.Tensor) -> torch.Tensor:
        """One batched attention. The heads that share a KV head become rows of it, so that it is read once."""
        keys, values = self.backend.keys[layer], self.backend.values[layer]
        rule = self.backend.rules[layer]
        num_sequences, num_kv_heads = group.num_sequences, self.backend.shape.num_kv_heads
        num_heads, head_dim = query.shape[1:]
        rows = query.index_select(0, group.rows).view(
            num_sequences, -1, num_kv_heads, num_heads // num_kv_heads, head_dim
        )
        rows = rows.permute(0, 2, 3, 1, 4).flatten(2, 3)
        keys = (
            keys.index_select(0, group.blocks)
            .to(query.dtype)
            .view(num_sequences, -1, num_kv_heads, head_dim)
            .transpose(1, 2)
        )
        values = (
            values.index_select(0, group.blocks)
            .to(query.dtype)
            .view(num_sequences, -1, num_kv_heads, head_dim)
            .transpose(1, 2)
        )
        output = _attend(rows, keys, values, rule, group.masks[rule.window])
        output = output.reshape(num_sequences, num_kv_heads, num_heads // num_kv_heads, -1, head_dim)
        return output.permute(0, 3, 1, 2, 4).reshape(-1, num_heads, head_dim)


def _attend(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: ScoreRule, mask: torch.Tensor
) -> torch.Tensor:
    if rule.softcap is None:
        return scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=rule.scale)
    scores = (rows @ keys.transpose(-1, -2)).float() * rule.scale
    scores = torch.tanh(scores / rule.softcap) * rule.softcap
    return scores.masked_fill(~mask, -math.inf).softmax(-1).to(values.dtype) @ values


def _group(rows: list[SequenceRows], block_size: int) -> list[list[SequenceRows]]:
    """Sequences in order, those of one row together when their block counts are within a factor of two."""
    groups: dict[tuple[int, int], list[SequenceRows]] = {}
    for number, sequence in enumerate(rows):
        num_blocks = -(-sequence.context_length // block_size)
        key = (0, num_blocks.bit_length()) if sequence.num_rows == 1 else (1, number)
        groups.setdefault(key, []).append(sequence)
    return list(groups.values())


def _mask(slots: torch.Tensor, positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """Whether the row at a position [S, Q] sees a slot [L] of its sequence: [S, Q, L]."""
    mask = slots <= positions[:, :, None]
    return mask if window is None else mask & (slots > positions[:, :, None] - window)
