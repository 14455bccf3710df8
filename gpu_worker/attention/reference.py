"""Paged attention in plain torch, on any device: gather the blocks, then scaled_dot_product_attention.

Every other backend is measured against this one.
"""

import math
import mmap
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from gpu_worker.attention.port import AttentionShape, SequenceRows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Sequences attended together: S of them with Q rows each, their contexts padded to L slots.

    rows: packed row numbers [S * Q]. blocks: padded block tables, flat [S * L / block_size].
    mask: which slots a row sees, [S, 1, Q * heads per KV head, L].
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    mask: torch.Tensor
    num_sequences: int


class ReferenceAttention:
    """Implements AttentionBackend. Two tensors per layer, [num_blocks + 1, block_size, kv_heads, head_dim].

    Every slot that is gathered holds numbers, because a masked slot has weight zero, but zero times NaN is NaN: the last
    block, which pads block tables, stays zero, and a block that a step begins but does not fill is zeroed before.
    """

    name = "reference"

    def __init__(self, shape: AttentionShape, *, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        self.device = device
        size = (shape.num_layers, shape.num_blocks + 1, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.keys = _zeros(size, device, dtype)
        self.values = _zeros(size, device, dtype)

    def begin_step(self, rows: list[SequenceRows]) -> "ReferenceStep":
        slots = [self._slots(sequence) for sequence in rows]
        begun = [block for sequence in rows for block in self._begun_block(sequence)]
        return ReferenceStep(
            backend=self,
            slots=torch.cat(slots).to(self.device),
            begun_blocks=torch.tensor(begun, dtype=torch.int64, device=self.device) if begun else None,
            groups=[self._make_group(members) for members in _group(rows, self.shape.block_size)],
        )

    def _begun_block(self, sequence: SequenceRows) -> tuple[int, ...]:
        """The sequence's last block, if this step writes its first slot and not its last."""
        last_block, num_filled = divmod(sequence.context_length, self.shape.block_size)
        is_begun = 0 < num_filled <= sequence.num_rows
        return (sequence.block_table[last_block],) if is_begun else ()

    def _slots(self, sequence: SequenceRows) -> torch.Tensor:
        """Slot of each row: block times block_size plus offset."""
        positions = torch.arange(sequence.context_length - sequence.num_rows, sequence.context_length)
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
        mask = torch.arange(max(widths) * self.shape.block_size) <= positions[:, :, None]
        first_rows = torch.tensor([member.first_row for member in members])
        return _Group(
            rows=(first_rows[:, None] + torch.arange(num_rows)).flatten().to(self.device),
            blocks=torch.tensor(tables, dtype=torch.int64).flatten().to(self.device),
            mask=mask[:, None].repeat(1, 1, heads_per_kv_head, 1).to(self.device),
            num_sequences=len(members),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceStep:
    """Implements StepAttention."""

    backend: ReferenceAttention
    slots: torch.Tensor
    begun_blocks: torch.Tensor | None
    groups: list[_Group]

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = self.backend.keys[layer], self.backend.values[layer]
        if self.begun_blocks is not None:
            keys.index_fill_(0, self.begun_blocks, 0)
            values.index_fill_(0, self.begun_blocks, 0)
        keys.flatten(0, 1).index_copy_(0, self.slots, key)
        values.flatten(0, 1).index_copy_(0, self.slots, value)
        if len(self.groups) == 1:
            return self._attend(self.groups[0], query, keys, values)
        output = torch.empty_like(query)
        for group in self.groups:
            output.index_copy_(0, group.rows, self._attend(group, query, keys, values))
        return output

    def _attend(self, group: _Group, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """One batched attention. The heads that share a KV head become rows of it, so that it is read once."""
        num_sequences, num_kv_heads = group.num_sequences, self.backend.shape.num_kv_heads
        num_heads, head_dim = query.shape[1:]
        rows = query.index_select(0, group.rows).view(
            num_sequences, -1, num_kv_heads, num_heads // num_kv_heads, head_dim
        )
        rows = rows.permute(0, 2, 3, 1, 4).flatten(2, 3)
        keys = keys.index_select(0, group.blocks).view(num_sequences, -1, num_kv_heads, head_dim).transpose(1, 2)
        values = values.index_select(0, group.blocks).view(num_sequences, -1, num_kv_heads, head_dim).transpose(1, 2)
        output = scaled_dot_product_attention(rows, keys, values, attn_mask=group.mask)
        output = output.reshape(num_sequences, num_kv_heads, num_heads // num_kv_heads, -1, head_dim)
        return output.permute(0, 3, 1, 2, 4).reshape(-1, num_heads, head_dim)


def _group(rows: list[SequenceRows], block_size: int) -> list[list[SequenceRows]]:
    """Sequences in order, those of one row together when their block counts are within a factor of two."""
    groups: dict[tuple[int, int], list[SequenceRows]] = {}
    for number, sequence in enumerate(rows):
        num_blocks = -(-sequence.context_length // block_size)
        key = (0, num_blocks.bit_length()) if sequence.num_rows == 1 else (1, number)
        groups.setdefault(key, []).append(sequence)
    return list(groups.values())


def _zeros(size: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Zeros; on the CPU as an anonymous mapping, which takes memory only page by page as blocks are used."""
    if device.type != "cpu":
        return torch.zeros(size, device=device, dtype=dtype)
    memory = mmap.mmap(-1, math.prod(size) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(size)
