"""Whether a packed model computes, cut into steps over paged KV memory, what it computes in one piece."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gpu_worker.attention.factory import make_attention
from gpu_worker.attention.layered import BlockCounts, LayerGeometry, make_layered
from gpu_worker.attention.port import SequenceRows
from gpu_worker.models.port import PackedModel

_LENGTHS = (41, 24)
_BLOCK_SIZE = 8
_FIRST_SHARES = (0.4, 0.9)
"""How much of each sequence goes through the first step: both steps have rows of both."""

# Relative to the largest logit. Faults are larger by a factor of a hundred and concern most rows; in 16 bits a few rows of a
# mixture of experts may go to another expert.
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_16_BITS = 5e-2
_WRONG_SHARE = {torch.float32: 0.0}
_WRONG_SHARE_16_BITS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Two sequences of random tokens."""

    sequences: tuple[torch.Tensor, ...]

    @classmethod
    def make(cls, text_config: Any, context_length: int) -> "Probe":
        """The same ones at every load. They reach beyond a short sliding window."""
        window = getattr(text_config, "sliding_window", None)
        beyond = window + _BLOCK_SIZE if isinstance(window, int) and window <= 4 * _LENGTHS[0] else 0
        generator = torch.Generator().manual_seed(0)
        lengths = (min(context_length, max(_LENGTHS[0], beyond)), min(context_length, _LENGTHS[1]))
        return cls(
            sequences=tuple(torch.randint(text_config.vocab_size, (length,), generator=generator) for length in lengths)
        )


class LayeredModel(PackedModel, Protocol):
    """A model that tells what its layers attend with."""

    layers: tuple[LayerGeometry, ...]
    vocab_size: int


def find_fault(
    model: LayeredModel, probe: Probe, expected: Sequence[torch.Tensor], *, dtype: torch.dtype
) -> str | None:
    """What is wrong with the packed logits; None if nothing. `expected`: logits [T, vocab_size] of each sequence."""
    if expected[0].shape[1] != model.vocab_size:
        return f"it has {expected[0].shape[1]} logits for a vocab_size of {model.vocab_size}"
    if not all(bool(logits.isfinite().all()) for logits in expected):
        return f"its logits are not finite in {str(dtype).removeprefix('torch.')}"
    found = _packed_logits(model, probe, dtype)
    largest = max(float(logits.abs().max()) for logits in expected)
    errors = torch.cat(
        [(ours - theirs).abs().amax(dim=1) / largest for ours, theirs in zip(found, expected, strict=True)]
    )
    is_wrong = ~(errors <= _TOLERANCE.get(dtype, _TOLERANCE_16_BITS))
    if float(is_wrong.float().mean()) <= _WRONG_SHARE.get(dtype, _WRONG_SHARE_16_BITS):
        return None
    return (
        f"packed and cut into steps, {int(is_wrong.sum())} of {len(errors)} rows have other logits than in one piece, "
        f"by up to {float(errors.max()):.2g} of the largest"
    )


def _packed_logits(model: LayeredModel, probe: Probe, dtype: torch.dtype) -> list[torch.Tensor]:
    """fp32 [T, vocab_size] of each sequence, in two steps."""
    tables = _interleaved_tables([len(token_ids) for token_ids in probe.sequences])
    blocks = BlockCounts(num_blocks=sum(map(len, tables)), block_size=_BLOCK_SIZE)
    attention = make_layered(
        model.layers, blocks, lambda shape: make_attention(shape, device=model.device, dtype=dtype)
    )
    cuts = [
        (0, round(len(token_ids) * share), len(token_ids))
        for token_ids, share in zip(probe.sequences, _FIRST_SHARES, strict=True)
    ]
    logits: list[list[torch.Tensor]] = [[] for _ in probe.sequences]
    for step in (0, 1):
        spans = [(cut[step], cut[step + 1]) for cut in cuts]
        rows, first_row = [], 0
        for (start, end), table in zip(spans, tables, strict=True):
            if end > start:
                rows.append(
                    SequenceRows(first_row=first_row, num_rows=end - start, context_length=end, block_table=table)
                )
            first_row += end - start
        if not rows:
            continue
        token_ids = torch.cat([ids[start:end] for ids, (start, end) in zip(probe.sequences, spans, strict=True)])
        positions = torch.cat([torch.arange(start, end) for start, end in spans])
        packed = model.logits(
            model.forward(token_ids.to(model.device), positions.to(model.device), attention.begin_step(rows))
        )
        ends = torch.tensor([end - start for start, end in spans]).cumsum(0)[:-1].tolist()
        for parts, part in zip(logits, packed.tensor_split(ends), strict=True):
            parts.append(part)
    return [torch.cat(parts) for parts in logits]


def _interleaved_tables(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Blocks for each sequence, in falling order."""
    counts = [-(-length // _BLOCK_SIZE) for length in lengths]
    ends = [sum(counts[: number + 1]) for number in range(len(counts))]
    return [tuple(range(end - 1, end - count - 1, -1)) for end, count in zip(ends, counts, strict=True)]
