"""The sampling kernels on the rows of one step: one call for all rows, on the threads that torch is set to.

A row's result has the same bits whatever other rows there are and however many threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.kernels.library import CpuKernels

DoubleArray = npt.NDArray[np.float64]
FloatArray = npt.NDArray[np.float32]
IdArray = npt.NDArray[np.int64]

DRAW_FIELDS = ("temperature", "top_k", "top_p", "min_p", "uniform")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMeasures:
    """Of each row: the logarithm of the sum of its exponentials, and its largest logits, of equals the first, with their
    tokens. Only the first `limits[i]` of row i are set."""

    log_totals: DoubleArray
    token_ids: IdArray
    logits: FloatArray


class SamplingKernels:
    """The kernels on `logits` [R, vocab_size], contiguous fp32 of the CPU, R > 0, which may change between the calls."""

    def __init__(self, kernels: CpuKernels, logits: torch.Tensor) -> None:
        assert logits.is_contiguous()
        assert logits.dtype == torch.float32
        self._functions = kernels.functions
        self._logits = logits
        self._num_rows, self._vocab_size = logits.shape
        self._threads = torch.get_num_threads()
        size = self._functions.sluice_sampling_scratch_size(self._vocab_size)
        self._scratch = np.empty(size * self._threads, dtype=np.uint8)

    def find_best(self) -> list[int]:
        """The largest of each row, of equals the first; -1 where one of the row is not finite."""
        tokens = np.empty(self._num_rows, dtype=np.int64)
        self._functions.sluice_find_best(
            self._logits.data_ptr(), self._num_rows, self._vocab_size, tokens.ctypes.data, self._scratch.ctypes.data,
            self._threads,
        )  # fmt: skip
        found: list[int] = tokens.tolist()
        return found

    def draw(self, rows: Sequence[int], draws: Sequence[tuple[float, ...]]) -> list[int]:
        """One token for each of `rows`, by its draw's DRAW_FIELDS; temperature 0 takes the largest."""
        places = np.array(rows, dtype=np.int64)
        table = np.array(draws, dtype=np.float64)
        assert table.shape == (len(rows), len(DRAW_FIELDS))
        tokens = np.empty(len(rows), dtype=np.int64)
        self._functions.sluice_draw_rows(
            self._logits.data_ptr(), places.ctypes.data, table.ctypes.data, len(rows), self._vocab_size,
            tokens.ctypes.data, self._scratch.ctypes.data, self._threads,
        )  # fmt: skip
        drawn: list[int] = tokens.tolist()
        assert min(drawn) >= 0, "every row has a token that can be drawn"
        return drawn

    def measure(self, rows: Sequence[int], limits: Sequence[int]) -> RowMeasures:
        """Of `rows`, whose logits are finite; each limit is at most the size of the vocabulary."""
        places, counts = np.array(rows, dtype=np.int64), np.array(limits, dtype=np.int64)
        assert counts.max() <= self._vocab_size
        measures = RowMeasures(
            log_totals=np.empty(len(rows)),
            token_ids=np.zeros((len(rows), counts.max()), dtype=np.int64),
            logits=np.zeros((len(rows), counts.max()), dtype=np.float32),
        )
        self._functions.sluice_measure_rows(
            self._logits.data_ptr(), places.ctypes.data, counts.ctypes.data, len(rows), self._vocab_size,
            measures.log_totals.ctypes.data, measures.token_ids.ctypes.data, measures.logits.ctypes.data, counts.max(),
            self._scratch.ctypes.data, self._threads,
        )  # fmt: skip
        return measures
