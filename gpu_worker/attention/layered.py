"""Attention for models whose layers differ in heads or sizes: a backend for each group of alike layers.

All groups have the same blocks, so that one block table and one set of moves serve them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gpu_worker.attention.port import AttentionBackend, AttentionShape, SequenceRows, StepAttention
from gpu_worker.engine.sequence import BlockMoves

MakeBackend = Callable[[AttentionShape], AttentionBackend]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGeometry:
    """Heads and sizes of one layer, and how it scores."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """KV memory of one token in this layer."""
        return 2 * self.num_kv_heads * self.head_dim * bytes_per_value


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """Blocks that every layer has."""

    num_blocks: int
    block_size: int
    num_host_blocks: int = 0


def make_layered(layers: Sequence[LayerGeometry], blocks: BlockCounts, make: MakeBackend) -> AttentionBackend:
    """One backend if all layers have the same heads and sizes, else a LayeredAttention. Raises what `make` raises."""
    members: dict[tuple[int, int, int], list[int]] = {}
    for index, layer in enumerate(layers):
        members.setdefault((layer.num_heads, layer.num_kv_heads, layer.head_dim), []).append(index)
    backends = [make(_shape([layers[index] for index in group], blocks)) for group in members.values()]
    if len(backends) == 1:
        return backends[0]
    places = {
        index: (number, inner) for number, group in enumerate(members.values()) for inner, index in enumerate(group)
    }
    return LayeredAttention(backends, tuple(places[index] for index in range(len(layers))))


def _shape(layers: list[LayerGeometry], blocks: BlockCounts) -> AttentionShape:
    return AttentionShape(
        num_layers=len(layers),
        num_heads=layers[0].num_heads,
        num_kv_heads=layers[0].num_kv_heads,
        head_dim=layers[0].head_dim,
        num_blocks=blocks.num_blocks,
        block_size=blocks.block_size,
        num_host_blocks=blocks.num_host_blocks,
        windows=tuple(layer.window for layer in layers),
        scales=tuple(layer.scale for layer in layers),
        softcaps=tuple(layer.softcap for layer in layers),
    )


class LayeredAttention:
    """Implements AttentionBackend over others. `places`: of each layer, the number of its backend and its layer there."""

    def __init__(self, backends: Sequence[AttentionBackend], places: tuple[tuple[int, int], ...]) -> None:
        self._backends = tuple(backends)
        self._places = places
        self.name = "+".join(dict.fromkeys(backend.name for backend in backends))
        self.is_batch_invariant = all(backend.is_batch_invariant for backend in backends)

    def move(self, moves: BlockMoves) -> None:
        for backend in self._backends:
            backend.move(moves)

    def begin_step(self, rows: list[SequenceRows]) -> "LayeredStep":
        return LayeredStep(steps=tuple(backend.begin_step(rows) for backend in self._backends), places=self._places)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredStep:
    """Implements StepAttention."""

    steps: tuple[StepAttention, ...]
    places: tuple[tuple[int, int], ...]

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        number, inner = self.places[layer]
        return self.steps[number](inner, query, key, value)
