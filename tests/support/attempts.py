"""Attempts on a worker, and what plays their engine."""

from gpu_worker.attempts import Assignment, AttemptBook, AttemptRef
from gpu_worker.engine.port import SequenceFinish, SequenceOutput, Timings
from service_kit.delta import Cursor, TokenLogprob, extend_chain, make_delta
from service_kit.ids import GenerationId
from service_kit.sampling import FinishReason, SamplingParams


def ref(attempt=1, generation="g"):
    return AttemptRef(generation_id=GenerationId(generation), attempt=attempt)


def assignment(attempt=1, *, output=(), generation="g"):
    return Assignment(
        ref=ref(attempt, generation),
        prompt_token_ids=(1, 2, 3),
        output_token_ids=tuple(output),
        sampling=SamplingParams(max_output_tokens=100),
        priority=0,
        nonce=5,
        traceparent="",
    )


FINISH = SequenceFinish(
    prompt_tokens=3,
    cached_prompt_tokens=0,
    output_tokens=0,
    timings=Timings(added=1, prefill_started=1, first_token=1, finished=1),
    reason=FinishReason.STOP,
)


def logprob_of(token_id):
    return TokenLogprob(-float(token_id), ((token_id, -float(token_id)),))


class Producer:
    """Plays the engine for one attempt: makes gapless deltas behind its prior output."""

    def __init__(self, book: AttemptBook, sequence_id: str, prior=()):
        self.book = book
        self.sequence_id = sequence_id
        self.cursor = Cursor(sequence_number=len(prior), chain=extend_chain(0, prior))

    def make(self, *token_ids, finish=None):
        delta = None
        if token_ids:
            texts = [f"<{each}>" for each in token_ids]
            delta = make_delta(after=self.cursor, token_ids=token_ids, texts=texts, logprobs=map(logprob_of, token_ids))
            self.cursor = delta.end
        return self.book.take_output(SequenceOutput(sequence_id=self.sequence_id, delta=delta, finish=finish))


def begin(book, attempt=1, *, output=(), generation="g"):
    spec = book.assign(assignment(attempt, output=output, generation=generation)).add
    return Producer(book, spec.sequence_id, output)
