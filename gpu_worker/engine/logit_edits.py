"""Applies biases, bans and penalties to the logits in place, and takes them back.

Only the entries concerned are read and written, all rows of a kind at once.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.engine.execution import SampleRequest
from gpu_worker.engine.penalties import EditsBySequence, is_edited

ALL_BANNED = "no token may be drawn: all of the vocabulary is banned before min_output_tokens"
OVERFLOW = "logit_bias and penalties make logits that are not finite"

IdArray = npt.NDArray[np.int64]


class LogitEdits:
    """The edits of one step. `undo` restores the logits bitwise; call it whatever happened in between."""

    def __init__(self, logits: torch.Tensor, edits: EditsBySequence) -> None:
        assert logits.is_contiguous()
        self._logits = logits
        self._vocab_size = logits.shape[1]
        self._edits = edits
        self._undo: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.failures: dict[int, str] = {}

    @property
    def _flat(self) -> torch.Tensor:
        return self._logits.view(-1)

    def apply(self, rows: Sequence[int], requests: Sequence[SampleRequest]) -> None:
        """Edits `rows`; `requests` are those of all rows. A row that cannot be drawn stands in `failures`."""
        if not rows:
            return
        edited = [row for row in rows if is_edited(requests[row].sampling)]
        self._add_biases([row for row in edited if self._has_known_biases(row, requests[row])], requests)
        self._ban([row for row in rows if requests[row].banned_token_ids], requests)
        self._penalise([row for row in edited if requests[row].sampling.has_penalties], requests)

    def undo(self) -> None:
        while self._undo:
            index, values = self._undo.pop()
            self._flat[index] = values

    def _has_known_biases(self, row: int, request: SampleRequest) -> bool:
        biases = request.sampling.logit_bias
        if biases and biases[-1][0] >= self._vocab_size:
            self.failures[row] = f"logit_bias: token {biases[-1][0]} is outside the vocabulary of {self._vocab_size}"
            return False
        return bool(biases)

    def _add_biases(self, rows: Sequence[int], requests: Sequence[SampleRequest]) -> None:
        if rows:
            edits = [self._edits.of(requests[row]) for row in rows]
            index, old = self._read(rows, [edit.bias_ids for edit in edits])
            self._write(index, old, old + self._floats(np.concatenate([edit.biases for edit in edits])))

    def _ban(self, rows: Sequence[int], requests: Sequence[SampleRequest]) -> None:
        if not rows:
            return
        banned = [np.array(sorted(requests[row].banned_token_ids), dtype=np.int64) for row in rows]
        banned = [token_ids[token_ids < self._vocab_size] for token_ids in banned]
        for row, token_ids in zip(rows, banned, strict=True):
            if len(token_ids) == self._vocab_size:
                self.failures[row] = ALL_BANNED
        index, old = self._read(rows, banned)
        self._undo.append((index, old))
        self._flat[index] = -torch.inf

    def _penalise(self, rows: Sequence[int], requests: Sequence[SampleRequest]) -> None:
        if not rows:
            return
        kept = [self._edits.of(requests[row]).counts(requests[row]) for row in rows]
        samplings = [requests[row].sampling for row in rows]
        table = np.array(
            [
                (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
                for sampling in samplings
            ]
        )
        repetition, presence, frequency = np.repeat(table, [len(counts.ids) for counts in kept], axis=0).T
        counts = np.concatenate([counts.counts for counts in kept])
        taken = self._floats(counts * frequency + (counts > 0) * presence)
        divisor = self._floats(repetition)
        index, old = self._read(rows, [counts.ids for counts in kept])
        self._write(index, old, torch.where(old > 0, old / divisor, old * divisor) - taken)

    def _read(self, rows: Sequence[int], token_ids: Sequence[IdArray]) -> tuple[torch.Tensor, torch.Tensor]:
        """Places in the flat logits and what stands there."""
        starts = np.repeat(np.array(rows) * self._vocab_size, [len(ids) for ids in token_ids])
        index = torch.from_numpy(np.concatenate(token_ids) + starts).to(self._flat.device)
        return index, self._flat[index]

    def _write(self, index: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> None:
        self._undo.append((index, old))
        self._flat[index] = new
        # What was banned stays at -inf; anything else that stops to be finite cannot be drawn from.
        broken = ~torch.isfinite(new) & (old > -torch.inf)
        if bool(broken.any()):
            for place in index[broken].tolist():
                self.failures[place // self._vocab_size] = OVERFLOW

    def _floats(self, values: npt.NDArray[np.floating]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.float32)).to(self._flat.device)
