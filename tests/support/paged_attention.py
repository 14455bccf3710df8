"""Drives an attention backend through steps, and the dense fp64 computation that it is compared with."""

import dataclasses
import itertools
import math
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from gpu_worker.attention.cpu import CpuAttention
from gpu_worker.attention.port import AttentionBackend, AttentionShape, ScoreRule, SequenceRows
from gpu_worker.attention.reference import ReferenceAttention
from gpu_worker.kernels.library import CpuKernels, load_cpu_kernels

if TYPE_CHECKING:
    from gpu_worker.attention.triton import TritonAttention

Step = list[tuple[int, int]]
"""(sequence, rows) in packed order."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Query, key and value of every position of a sequence."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def make_heads(shape: AttentionShape, length: int, seed: int) -> Heads:
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(length, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, generator=generator)
    query, key, value = fused.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)
    return Heads(query=query * 2, key=key, value=value)


def dense(heads: Heads, rule: ScoreRule) -> torch.Tensor:
    """Attention of all positions at once in fp64."""
    query, key, value = heads.query.double(), heads.key.double(), heads.value.double()
    length, num_heads, _ = query.shape
    key, value = (part.repeat_interleave(num_heads // part.shape[1], dim=1) for part in (key, value))
    positions = torch.arange(length)
    is_seen = positions <= positions[:, None]
    if rule.window is not None:
        is_seen &= positions > positions[:, None] - rule.window
    scores = torch.einsum("qhd,khd->hqk", query, key) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~is_seen, -math.inf).softmax(-1), value)


def need_kernels() -> CpuKernels:
    """The kernels; without a compiler there are none, and the test is skipped."""
    kernels = load_cpu_kernels()
    if kernels is None and shutil.which("g++") is None:
        pytest.skip("the CPU kernels need a C++ compiler")
    assert kernels is not None, "the CPU kernels are not built: make kernels"
    return kernels


def make_backend(name: str, shape: AttentionShape, kv_dtype: torch.dtype = torch.float32) -> AttentionBackend:
    """A backend whose memory is full of what is not a number."""
    if name == "reference":
        reference = ReferenceAttention(shape, device=torch.device("cpu"), dtype=kv_dtype)
        for memory in (reference.keys, reference.values):
            memory[:, :-1].fill_(math.nan)
        return reference
    if name == "triton":
        return make_triton(shape, kv_dtype)
    backend = CpuAttention(shape, need_kernels(), kv_dtype)
    backend.blocks.fill_(math.nan)
    return backend


def need_triton() -> None:
    """Triton, on the GPU or with an interpreter that works; elsewhere the test is skipped."""
    triton = pytest.importorskip("triton", reason="Triton is made for Linux on x86-64")
    if os.environ.get("TRITON_INTERPRET") == "1" and triton.__version__.startswith("3.6."):
        pytest.skip("the interpreter of Triton 3.6 cannot loop with numpy 2.4")


def make_triton(
    shape: AttentionShape, kv_dtype: torch.dtype = torch.float32, dtype: torch.dtype = torch.float32
) -> "TritonAttention":
    """The kernels on the GPU, or interpreted on the CPU. Memory as in make_backend; contexts are split from 128 keys on."""
    need_triton()
    from gpu_worker.attention.triton import TritonAttention  # noqa: PLC0415 - not there everywhere

    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if is_interpreted:
        from triton.runtime.interpreter import interpreter_builder  # noqa: PLC0415

        # Not that every sum of integers be computed twice, to see whether it overflows.
        interpreter_builder.options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
    device = torch.device("cpu" if is_interpreted else "cuda")
    backend = TritonAttention(shape, device=device, dtype=dtype, kv_dtype=kv_dtype, least_split_keys=64)
    for memory in (backend.keys, backend.values):
        memory.fill_(math.nan)
    return backend


class Run:
    """Sequences on one backend, each with a block table, advanced by steps; outputs [layers, T, heads, head_dim]."""

    def __init__(
        self, backend: AttentionBackend, shape: AttentionShape, sequences: list[Heads], tables: list[tuple[int, ...]]
    ):
        self.backend, self.shape, self.sequences, self.tables = backend, shape, sequences, tables
        self.computed = [0] * len(sequences)
        self.outputs: list[list[torch.Tensor]] = [[] for _ in sequences]

    def step(self, step: Step) -> None:
        for (number, count), part in zip(step, self.compute(step), strict=True):
            self.outputs[number].append(part)
            self.computed[number] += count

    def compute(self, step: Step) -> list[torch.Tensor]:
        """The outputs of a step per sequence; nothing is taken for computed, so that it may be repeated."""
        rows, slices = [], []
        first_rows = itertools.accumulate((count for _, count in step), initial=0)
        for (number, count), first_row in zip(step, first_rows, strict=False):
            start = self.computed[number]
            rows.append(
                SequenceRows(
                    first_row=first_row,
                    num_rows=count,
                    context_length=start + count,
                    block_table=self.tables[number][: -(-(start + count) // self.shape.block_size)],
                )
            )
            slices.append((self.sequences[number], slice(start, start + count)))
        attend = self.backend.begin_step(rows)
        device = getattr(self.backend, "device", torch.device("cpu"))
        query, key, value = (
            torch.cat([getattr(heads, part)[at] for heads, at in slices]).to(device)
            for part in ("query", "key", "value")
        )
        with np.errstate(all="ignore"):  # Triton's interpreter computes with numpy
            packed = torch.stack([attend(layer, query, key, value).cpu() for layer in range(self.shape.num_layers)])
        return list(packed.split([count for _, count in step], dim=1))

    def result(self, number: int) -> torch.Tensor:
        return torch.cat(self.outputs[number], dim=1)


def sized(lengths: list[int], backend: str) -> list[int]:
    """A third of the lengths for the backend that an interpreter runs."""
    return [-(-length // 3) for length in lengths] if backend == "triton" else lengths


def place(shape: AttentionShape, lengths: list[int], rng: random.Random) -> list[tuple[int, ...]]:
    """Block tables over random blocks of the pool."""
    free = rng.sample(range(shape.num_blocks), shape.num_blocks)
    return [tuple(free.pop() for _ in range(-(-length // shape.block_size))) for length in lengths]


def random_steps(lengths: list[int], rng: random.Random, chunks: tuple[int, ...]) -> Iterator[Step]:
    """Random subsets of the sequences in random order, each with a random number of its next rows, until all are done."""
    left = list(lengths)
    while any(left):
        alive = [number for number, rows in enumerate(left) if rows]
        step = [
            (number, min(left[number], rng.choice(chunks))) for number in rng.sample(alive, rng.randint(1, len(alive)))
        ]
        for number, count in step:
            left[number] -= count
        yield step
