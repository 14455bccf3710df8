"""One sequence between `add` and its last output: its text side, its timings, and how it ends. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gpu_worker.engine.port import SequenceFinish, SequenceOutput, SequenceSpec, Timings
from gpu_worker.engine.sequence import Sequence as ScheduledSequence
from gpu_worker.engine.text import OutputStage, StopMatch
from service_kit.delta import Delta, TokenLogprob, join
from service_kit.sampling import FinishReason


@dataclass(slots=True, kw_only=True)
class LiveSequence:
    """Mutable, owned by the engine; `sequence` is its scheduling side. Times are Unix seconds, 0 before they happen."""

    spec: SequenceSpec
    stage: OutputStage
    sequence: ScheduledSequence
    clock: Callable[[], float]
    added: float
    prefill_started: float = 0.0
    first_token: float = 0.0
    is_aborted: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether the output already ended; true from the start when an earlier attempt died before it said so."""
        return self.stage.stop is not None or self.stage.num_generated >= self.spec.sampling.max_output_tokens

    @property
    def next_position(self) -> int:
        """Sequence number of the token that is drawn next, held ones counted."""
        return self.stage.num_generated + 1

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> SequenceOutput | None:
        """What the next token causes; None when it is held back. `logprob` iff the request asked for it."""
        stage = self.stage
        emission = stage.push(token_id, logprob)
        if emission.stop is not None or stage.num_generated >= self.spec.sampling.max_output_tokens:
            return self.complete(emission.delta)
        if emission.delta is None:
            return None
        return SequenceOutput(sequence_id=self.spec.sequence_id, delta=emission.delta)

    def complete(self, delta: Delta | None = None) -> SequenceOutput:
        """The last output of a complete sequence, with what the last token emitted. STOP outranks LENGTH."""
        if self.stage.stop is not None:
            return self._finish(delta, reason=FinishReason.STOP, stop=self.stage.stop)
        return self._finish(_join(delta, self.stage.flush().delta), reason=FinishReason.LENGTH)

    def cancel(self) -> SequenceOutput:
        """The last output of an aborted sequence, with the tokens that were held back."""
        return self._finish(self.stage.flush().delta, reason=FinishReason.CANCELLED)

    def fail(self, failure: str) -> SequenceOutput:
        """The last output of a sequence that cannot go on."""
        return self._finish(None, failure=failure)

    def _finish(
        self,
        delta: Delta | None,
        *,
        reason: FinishReason | None = None,
        failure: str | None = None,
        stop: StopMatch | None = None,
    ) -> SequenceOutput:
        finish = SequenceFinish(
            prompt_tokens=len(self.spec.prompt_token_ids),
            cached_prompt_tokens=min(self.sequence.num_cached_tokens, len(self.spec.prompt_token_ids)),
            output_tokens=self.stage.cursor.sequence_number,
            timings=Timings(
                added=self.added,
                prefill_started=self.prefill_started,
                first_token=self.first_token,
                finished=self.clock(),
            ),
            reason=reason,
            failure=failure,
            matched_stop=stop.matched_stop if stop is not None else None,
        )
        return SequenceOutput(sequence_id=self.spec.sequence_id, delta=delta, finish=finish)


def merge(outputs: Sequence[SequenceOutput]) -> SequenceOutput | None:
    """One output for several of a sequence that follow each other in a step; None for none."""
    if not outputs:
        return None
    if len(outputs) == 1:
        return outputs[0]
    return replace(outputs[-1], delta=_join(*(output.delta for output in outputs)))


def _join(*deltas: Delta | None) -> Delta | None:
    return join(delta for delta in deltas if delta is not None)
