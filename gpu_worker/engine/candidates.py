"""Finds the few logits of a row that can be drawn, without sorting the row.

Only comparisons happen here, and those are exact: the same logits give the same candidates on any device and beside any
neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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

    All equals of the smallest candidate of a row are candidates too. The maxima of groups of 32 give a bound below which
    none of the k largest lies: the k-th largest maximum, because k values of as many groups reach it.
    """
    num_rows, vocab_size = logits.shape
    if vocab_size % _GROUP:
        logits = torch.nn.functional.pad(logits, (0, -vocab_size % _GROUP), value=-torch.inf)
    groups = logits.view(num_rows, -1, _GROUP)
    maxima = groups.amax(-1)
    floors = _floors(logits, maxima, limits)
    rows, columns = (maxima >= floors).nonzero(as_tuple=True)
    members = groups[rows, columns]
    places, lanes = ((members >= floors[rows]) & (members > -torch.inf)).nonzero(as_tuple=True)
    counts = torch.bincount(rows[places], minlength=num_rows)
    return Candidates(
        token_ids=_to_numpy(columns[places] * _GROUP + lanes),
        logits=_to_numpy(members[places, lanes]),
        counts=_to_numpy(counts),
    )


def _floors(logits: torch.Tensor, maxima: torch.Tensor, limits: Sequence[int]) -> torch.Tensor:
    """For each row a value that at least `limits[i]` of its logits reach, [R, 1]."""
    if max(limits) <= min(_MAX_GROUPED, maxima.shape[1]):
        return _kth_largest(maxima, limits)
    return torch.cat([_kth_largest(logits[row : row + 1], [limit]) for row, limit in enumerate(limits)])


def _kth_largest(values: torch.Tensor, limits: Sequence[int]) -> torch.Tensor:
    if values.device.type == "cpu":
        # Several times faster than topk, and the same values.
        ranks = np.array([values.shape[1] - limit for limit in limits])
        parted = np.partition(values.numpy(), np.unique(ranks), axis=1)
        return torch.from_numpy(np.take_along_axis(parted, ranks[:, None], axis=1))
    index = torch.tensor(limits, device=values.device)[:, None] - 1
    return values.topk(max(limits), dim=-1).values.gather(1, index)


def _to_numpy(values: torch.Tensor) -> npt.NDArray[Any]:
    return values.cpu().numpy()
