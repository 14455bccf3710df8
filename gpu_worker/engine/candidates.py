"""Finds the few logits of a row that can be drawn, without sorting the row.

Only comparisons happen here, and those are exact: the same logits give the same candidates on any device and beside any
neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_GROUP = 32
_MAX_GROUPED = 128

FloatArray = npt.NDArray[np.float32]
IdArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Candidates of several rows, one row behind the other and each in vocabulary order; `counts[i]` are row i's."""

    token_ids: IdArray
    logits: FloatArray
    counts: IdArray

    def padded(self) -> FloatArray:
        """The logits as [rows, largest count], each row filled up with -inf at its end."""
        width = int(self.counts.max())
        values = np.full((len(self.counts), width), -np.inf, dtype=np.float32)
        values[np.arange(width) < self.counts[:, None]] = self.logits
        return values

    def split(self) -> "list[Candidates]":
        """One value per row."""
        ends = np.cumsum(self.counts)
        return [
            Candidates(
                token_ids=self.token_ids[end - count : end],
                logits=self.logits[end - count : end],
                counts=self.counts[row : row + 1],
            )
            for row, (end, count) in enumerate(zip(ends, self.counts, strict=True))
        ]


def join(parts: Sequence[Candidates]) -> Candidates:
    """The rows of all parts in order; at least one part."""
    if len(parts) == 1:
        return parts[0]
    return Candidates(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logits=np.concatenate([part.logits for part in parts]),
        counts=np.concatenate([part.counts for part in parts]),
    )


def find_largest(logits: torch.Tensor, limits: Sequence[int]) -> Candidates:
    """The `limits[i]` largest of each row i of `logits` [R, vocab_size] and a few more, R > 0, 1 <= limit <= vocab_size.

    All equals of the smallest candidate of a row are candidates too; -inf never is one. The maxima of groups of 32 give a
    bound below which none of the k largest lies: the k-th largest maximum, because k values of as many groups reach it.
    The device only makes the maxima and gathers groups: few calls, so that no threads meet at many barriers.
    """
    num_rows, vocab_size = logits.shape
    if vocab_size % _GROUP:
        logits = torch.nn.functional.pad(logits, (0, -vocab_size % _GROUP), value=-torch.inf)
    maxima = logits.view(num_rows, -1, _GROUP).amax(-1).cpu().numpy()
    floors = np.maximum(_floors(logits, maxima, np.array(limits)), np.finfo(np.float32).min)
    groups = np.flatnonzero(maxima >= floors[:, None])
    rows, columns = np.divmod(groups, maxima.shape[1])
    members = logits.view(-1, _GROUP)[torch.from_numpy(groups).to(logits.device)].cpu().numpy()
    found = np.flatnonzero(members >= floors[rows][:, None])
    places, lanes = np.divmod(found, _GROUP)
    return Candidates(
        token_ids=columns[places] * _GROUP + lanes,
        logits=members.reshape(-1)[found],
        counts=np.bincount(rows[places], minlength=num_rows),
    )


def _floors(logits: torch.Tensor, maxima: FloatArray, limits: IdArray) -> FloatArray:
    """For each row a value that at least `limits[i]` of its logits reach, [R]."""
    floors = np.empty(len(limits), dtype=np.float32)
    # The maxima of more groups would not leave few candidates.
    is_grouped = limits <= min(_MAX_GROUPED, maxima.shape[1])
    if is_grouped.any():
        floors[is_grouped] = _kth_largest(maxima[is_grouped], limits[is_grouped])
    if not is_grouped.all():
        rows = np.flatnonzero(~is_grouped)
        whole = logits[torch.from_numpy(rows).to(logits.device)].cpu().numpy()
        floors[rows] = _kth_largest(whole, limits[rows])
    return floors


def _kth_largest(values: FloatArray, limits: IdArray) -> FloatArray:
    ranks = values.shape[1] - limits
    floors: FloatArray = np.partition(values, np.unique(ranks), axis=1)[np.arange(len(values)), ranks]
    return floors
