"""The sequences that an engine has, and the names of those that it had. Pure."""

from collections import OrderedDict

from gpu_worker.engine.execution import SampleRequest
from gpu_worker.engine.live_sequence import LiveSequence

_MAX_FINISHED_IDS = 4096


class LiveSequences(dict[str, LiveSequence]):
    """By sequence id, in order of arrival.

    The ends are remembered, so that an add repeated after the end does not run the sequence again; the oldest is forgotten.
    """

    def __init__(self) -> None:
        super().__init__()
        self._finished_ids: OrderedDict[str, None] = OrderedDict()

    def has_seen(self, sequence_id: str) -> bool:
        """Whether it is here, or was until lately."""
        return sequence_id in self or sequence_id in self._finished_ids

    def finish(self, sequence_id: str) -> None:
        """It has had its last output."""
        del self[sequence_id]
        self._finished_ids[sequence_id] = None
        if len(self._finished_ids) > _MAX_FINISHED_IDS:
            self._finished_ids.popitem(last=False)

    def request_behind(self, sequence_id: str, draft_token_ids: tuple[int, ...] = ()) -> SampleRequest:
        """How the token behind the newest one and these proposed ones is drawn."""
        live = self[sequence_id]
        sequence, position = live.sequence, live.next_position + len(draft_token_ids)
        return SampleRequest(
            sequence_id=sequence_id,
            sampling=live.spec.sampling,
            position=position,
            token_ids=sequence.token_ids,
            num_prompt_tokens=sequence.num_prompt_tokens,
            draft_token_ids=draft_token_ids,
            # The end tokens while the output is too short.
            banned_token_ids=live.stage.rules.banned_at(position),
        )
