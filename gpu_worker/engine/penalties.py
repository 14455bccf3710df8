"""What a sequence changes in its logits: biases, bans, and the counts that penalties need. Kept between the steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpu_worker.engine.execution import SampleRequest
from service_kit.sampling import SamplingParams

IdArray = npt.NDArray[np.int64]
DoubleArray = npt.NDArray[np.float64]


class TokenCounts:
    """The different tokens of a sequence and how often its output has each.

    Grows with the sequence: a step costs what it adds, however long the context is.
    """

    def __init__(self, *, token_ids: Sequence[int], num_prompt_tokens: int, with_prompt: bool) -> None:
        prompt = list(dict.fromkeys(token_ids[:num_prompt_tokens])) if with_prompt else []
        self._num_prompt_tokens = num_prompt_tokens
        self._num_seen = num_prompt_tokens
        self._num_ids = len(prompt)
        self._ids = np.zeros(len(prompt) + 64, dtype=np.int64)
        self._ids[: len(prompt)] = prompt
        self._counts = np.zeros(len(self._ids), dtype=np.float64)
        self._place_by_id = {token_id: place for place, token_id in enumerate(prompt)}
        self.extend(token_ids)

    @property
    def ids(self) -> IdArray:
        """Each token once."""
        return self._ids[: self._num_ids]

    @property
    def counts(self) -> DoubleArray:
        """How often the output has the token of the same index in `ids`; 0 for those of the prompt alone."""
        return self._counts[: self._num_ids]

    def extend(self, token_ids: Sequence[int]) -> None:
        """Counts what `token_ids`, the whole sequence, has more than before."""
        assert len(token_ids) >= self._num_seen, "a sequence only grows"
        for token_id in token_ids[self._num_seen :]:
            place = self._place_by_id.get(token_id)
            if place is None:
                place = self._append(token_id)
            self._counts[place] += 1
        self._num_seen = len(token_ids)

    def supposing(self, token_ids: Sequence[int]) -> "SupposedCounts":
        """The counts with `token_ids` added; these here stay as they are."""
        new = {token_id: None for token_id in token_ids if token_id not in self._place_by_id}
        place_by_new_id = {token_id: self._num_ids + place for place, token_id in enumerate(new)}
        counts = np.concatenate([self.counts, np.zeros(len(new))])
        for token_id in token_ids:
            place = self._place_by_id.get(token_id)
            counts[place_by_new_id[token_id] if place is None else place] += 1
        return SupposedCounts(ids=np.concatenate([self.ids, np.array(list(new), dtype=np.int64)]), counts=counts)

    def _append(self, token_id: int) -> int:
        place = self._num_ids
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token_id
        self._place_by_id[token_id] = place
        self._num_ids += 1
        return place


@dataclass(frozen=True, slots=True, kw_only=True)
class SupposedCounts:
    """What `TokenCounts` would be if some proposed tokens had been drawn."""

    ids: IdArray
    counts: DoubleArray


class SequenceEdits:
    """The changes of one sequence as arrays, so that a step converts nothing it converted before."""

    def __init__(self, request: SampleRequest) -> None:
        self.sampling = request.sampling
        self.bias_ids = np.array([token_id for token_id, _ in self.sampling.logit_bias], dtype=np.int64)
        self.biases = np.array([bias for _, bias in self.sampling.logit_bias], dtype=np.float32)
        self._counts: TokenCounts | None = None

    def counts(self, request: SampleRequest) -> TokenCounts | SupposedCounts:
        """The tokens that are penalised now."""
        if self._counts is None:
            self._counts = TokenCounts(
                token_ids=request.token_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                with_prompt=self.sampling.repetition_penalty != 1,
            )
        else:
            self._counts.extend(request.token_ids)
        return self._counts.supposing(request.draft_token_ids) if request.draft_token_ids else self._counts


class EditsBySequence:
    """The edits of all live sequences; an owner calls `forget` at each one's end."""

    def __init__(self) -> None:
        self._edits: dict[str, SequenceEdits] = {}

    def __len__(self) -> int:
        return len(self._edits)

    def of(self, request: SampleRequest) -> SequenceEdits:
        """Made anew from the request when the sequence is not known, or not with these parameters."""
        edits = self._edits.get(request.sequence_id)
        if edits is None or (edits.sampling is not request.sampling and edits.sampling != request.sampling):
            edits = self._edits[request.sequence_id] = SequenceEdits(request)
        return edits

    def forget(self, sequence_id: str) -> None:
        self._edits.pop(sequence_id, None)


def is_edited(sampling: SamplingParams) -> bool:
    """Whether anything but bans changes logits."""
    return bool(sampling.logit_bias) or sampling.has_penalties
