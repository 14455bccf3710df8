"""Logits of given tokens, by our engine's own step: the rows of several sequences packed, cut and mixed."""

from collections.abc import Iterator, Sequence

import torch

from gpu_worker.engine.model_runner import ModelRunner
from gpu_worker.engine.sequence import PlannedSequence, StepPlan

PackedLogits = dict[tuple[int, int], torch.Tensor]
"""Logits [vocab_size] by number of the sequence and number of tokens they follow."""


def packed_logits(
    runner: ModelRunner, sequences: Sequence[tuple[int, ...]], *, block_size: int, chunks: Sequence[int]
) -> PackedLogits:
    """The logits behind each chunk of each sequence.

    `chunks` are numbers of rows, taken in turn until each sequence is at its end; sequence n begins with entry n, so that
    decodes and prefill chunks of several lengths share a step. The blocks of the sequences lie interleaved.
    """
    tables = _interleaved_tables(sequences, block_size)
    works = [
        _chunks_of(str(number), token_ids, table, chunks[number % len(chunks) :] + chunks[: number % len(chunks)])
        for number, (token_ids, table) in enumerate(zip(sequences, tables, strict=True))
    ]
    logits: PackedLogits = {}
    while planned := tuple(chunk for work in works if (chunk := next(work, None)) is not None):
        rows = runner.logits(StepPlan(sequences=planned))
        for chunk, row in zip(planned, rows, strict=True):
            logits[int(chunk.sequence_id), chunk.context_length] = row.clone()
    return logits


def _interleaved_tables(sequences: Sequence[tuple[int, ...]], block_size: int) -> list[tuple[int, ...]]:
    num_blocks = -(-max(map(len, sequences)) // block_size)
    return [
        tuple((num_blocks - 1 - index) * len(sequences) + number for index in range(num_blocks))
        for number in range(len(sequences))
    ]


def _chunks_of(
    sequence_id: str, token_ids: tuple[int, ...], table: tuple[int, ...], chunks: Sequence[int]
) -> Iterator[PlannedSequence]:
    start, turn = 0, 0
    while start < len(token_ids):
        chunk = token_ids[start : start + chunks[turn % len(chunks)]]
        yield PlannedSequence(sequence_id=sequence_id, start=start, token_ids=chunk, block_table=table, is_sampled=True)
        start, turn = start + len(chunk), turn + 1
