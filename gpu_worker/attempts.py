"""What a worker session holds: every attempt with all it produced, until its end is acknowledged. Pure.

The record of an attempt is the re-send buffer: nothing is queued for sending, a batch is cut from the records when there
is room for one. A slow scheduler so gets fewer, fatter batches, and a new one can have everything again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from gpu_worker.engine.port import SequenceFinish, SequenceOutput, SequenceSpec, Timings
from service_kit.delta import Delta, extend_chain
from service_kit.ids import GenerationId, SessionId
from service_kit.logprob_codec import pack_logprobs, unpack_logprobs
from service_kit.sampling import SamplingParams

MAX_BATCH_TOKENS = 16_384
"""Tokens in one batch; what is left goes into the next. Keeps a full re-send below gRPC's message limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRef:
    """Names one attempt."""

    generation_id: GenerationId
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One granted attempt, as the scheduler sent it."""

    ref: AttemptRef
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int
    nonce: int
    traceparent: str
    prefix_salt: str = ""


class VerdictAction(Enum):
    """What the scheduler wants done with an attempt that the worker named."""

    KEEP = auto()
    RESEND_FROM = auto()
    ABORT = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldAttempt:
    """An attempt as hello and heartbeats name it; `position` is the last sequence number produced."""

    ref: AttemptRef
    position: int
    is_finished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptNews:
    """News of one attempt for a batch: tokens, the end, or both (then the end follows the tokens)."""

    ref: AttemptRef
    delta: Delta | None
    end: SequenceFinish | None


@dataclass(slots=True, kw_only=True)
class AttemptRecord:
    """Owner of one attempt's output on this worker.

    `packed_logprobs` has one entry per token, or none at all: 20 alternatives take 200 bytes packed and 2,300 as objects.
    `num_sent` counts the own tokens that the current stream has; `sent_chain` is the chain behind them. `newest` is the
    engine's last delta: a stream that has all before it gets it as it is. A record that `awaits_verdict` sends nothing: the
    new stream's scheduler has not yet said how far its log goes.
    """

    ref: AttemptRef
    sequence_id: str
    num_prior: int
    num_prompt_tokens: int = 0
    traceparent: str = ""
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    packed_logprobs: list[bytes] = field(default_factory=list)
    base_chain: int = 0
    chain: int = 0
    num_sent: int = 0
    sent_chain: int = 0
    newest: Delta | None = None
    end: SequenceFinish | None = None
    is_end_sent: bool = False
    awaits_verdict: bool = False

    @property
    def position(self) -> int:
        return self.num_prior + len(self.token_ids)

    @property
    def has_news(self) -> bool:
        if self.awaits_verdict:
            return False
        return self.num_sent < len(self.token_ids) or (self.end is not None and not self.is_end_sent)

    @property
    def is_urgent(self) -> bool:
        """Of a record with news: whether somebody waits for them, for the first token or the end."""
        return self.num_sent == 0 or self.end is not None

    def append(self, delta: Delta) -> None:
        assert delta.first == self.position + 1, "the engine numbers gaplessly"
        if not self.token_ids:
            self.base_chain = self.sent_chain = delta.prev_chain
        self.token_ids += delta.token_ids
        self.texts += delta.texts
        if delta.logprobs:
            self.packed_logprobs += [pack_logprobs([each]) for each in delta.logprobs]
        self.chain = delta.chain
        self.newest = delta

    def resend_from(self, sequence_number: int) -> None:
        """The next delta begins at `sequence_number`, as far as this attempt made it itself; the end follows again."""
        self.num_sent = min(max(sequence_number - 1 - self.num_prior, 0), len(self.token_ids))
        has_all = self.num_sent == len(self.token_ids)
        self.sent_chain = self.chain if has_all else extend_chain(self.base_chain, self.token_ids[: self.num_sent])
        self.is_end_sent = False
        self.awaits_verdict = False

    def take(self, max_tokens: int) -> AttemptNews:
        """At most `max_tokens` unsent tokens; the end once all are sent."""
        start, count = self.num_sent, len(self.token_ids)
        stop = min(start + max_tokens, count)
        delta = self._cut(start, stop) if stop > start else None
        if delta is not None:
            self.num_sent, self.sent_chain = stop, delta.chain
        end = self.end if stop == count else None
        self.is_end_sent = end is not None
        return AttemptNews(ref=self.ref, delta=delta, end=end)

    def _cut(self, start: int, stop: int) -> Delta:
        """Own tokens [start, stop), of which the stream has those before."""
        first, is_rest = self.num_prior + start + 1, stop == len(self.token_ids)
        if is_rest and self.newest is not None and self.newest.first == first:
            return self.newest
        token_ids = tuple(self.token_ids[start:stop])
        return Delta(
            first=first,
            token_ids=token_ids,
            texts=tuple(self.texts[start:stop]),
            prev_chain=self.sent_chain,
            chain=self.chain if is_rest else extend_chain(self.sent_chain, token_ids),
            logprobs=tuple(each for packed in self.packed_logprobs[start:stop] for each in unpack_logprobs(packed)),
        )


def failed_finish(record: AttemptRecord, failure: str) -> SequenceFinish:
    """The end of an attempt that the engine never ran; its output is what earlier attempts logged."""
    return SequenceFinish(
        prompt_tokens=record.num_prompt_tokens,
        cached_prompt_tokens=0,
        output_tokens=record.position,
        timings=Timings(added=0, prefill_started=0, first_token=0, finished=0),
        failure=failure,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCalls:
    """What the engine has to be told because of a command."""

    add: SequenceSpec | None = None
    abort: str | None = None


NOTHING = EngineCalls()


class AttemptBook:
    """Owner of all records of one worker session. One living attempt per generation; the highest wins."""

    def __init__(self, session_id: SessionId) -> None:
        self._session_id = session_id
        self._by_generation: dict[GenerationId, AttemptRecord] = {}
        self._by_sequence: dict[str, AttemptRecord] = {}
        self._with_news: dict[str, AttemptRecord] = {}
        self._urgent: dict[str, AttemptRecord] = {}

    def __len__(self) -> int:
        return len(self._by_generation)

    def __iter__(self) -> Iterator[AttemptRecord]:
        return iter(tuple(self._by_generation.values()))

    @property
    def has_news(self) -> bool:
        return bool(self._with_news)

    @property
    def has_urgent_news(self) -> bool:
        return bool(self._urgent)

    def find(self, ref: AttemptRef) -> AttemptRecord | None:
        record = self._by_generation.get(ref.generation_id)
        return record if record is not None and record.ref == ref else None

    def find_sequence(self, sequence_id: str) -> AttemptRecord | None:
        return self._by_sequence.get(sequence_id)

    def held(self) -> tuple[HeldAttempt, ...]:
        return tuple(
            HeldAttempt(ref=record.ref, position=record.position, is_finished=record.end is not None)
            for record in self._by_generation.values()
        )

    def assign(self, assignment: Assignment) -> EngineCalls:
        """Takes an attempt in. One that is known is not run twice, only sent again from behind the assigned output."""
        ref = assignment.ref
        current = self._by_generation.get(ref.generation_id)
        if current is not None and current.ref == ref:
            current.resend_from(len(assignment.output_token_ids) + 1)
            self._note(current)
            return NOTHING
        if current is not None and current.ref.attempt > ref.attempt:
            return NOTHING  # the grant was superseded while it travelled
        abort = self._drop(current) if current is not None else None
        record = self._new_record(ref, num_prior=len(assignment.output_token_ids))
        record.num_prompt_tokens = len(assignment.prompt_token_ids)
        record.traceparent = assignment.traceparent
        spec = SequenceSpec(
            sequence_id=record.sequence_id,
            prompt_token_ids=assignment.prompt_token_ids,
            output_token_ids=assignment.output_token_ids,
            sampling=assignment.sampling,
            priority=assignment.priority,
            nonce=assignment.nonce,
            prefix_salt=assignment.prefix_salt,
        )
        return EngineCalls(add=spec, abort=abort)

    def fail(self, ref: AttemptRef, failure: str, *, num_prior: int) -> EngineCalls:
        """Takes in an attempt that ended before it could begin."""
        current = self._by_generation.get(ref.generation_id)
        if current is not None and current.ref.attempt >= ref.attempt:
            return NOTHING
        abort = self._drop(current) if current is not None else None
        record = self._new_record(ref, num_prior=num_prior)
        record.end = failed_finish(record, failure)
        self._note(record)
        return EngineCalls(abort=abort)

    def cancel(self, ref: AttemptRef) -> EngineCalls:
        """The end comes from the engine, with reason CANCELLED; an attempt that has ended keeps its end."""
        record = self.find(ref)
        return EngineCalls(abort=record.sequence_id) if record is not None and record.end is None else NOTHING

    def forget(self, ref: AttemptRef) -> EngineCalls:
        """Nothing more is said about the attempt; if it still runs, it stops."""
        record = self.find(ref)
        return EngineCalls(abort=self._drop(record)) if record is not None else NOTHING

    def take_output(self, output: SequenceOutput) -> AttemptRecord | None:
        """Books what the engine made; None when nobody asks for that sequence any more."""
        record = self._by_sequence.get(output.sequence_id)
        if record is None:
            return None
        if output.delta is not None:
            record.append(output.delta)
        if output.finish is not None:
            record.end = output.finish
        self._note(record)
        return record

    def begin_stream(self) -> None:
        """A new stream knows nothing: every record waits for its verdict, with all it has made until now as sent."""
        for record in self._by_generation.values():
            record.resend_from(record.position + 1)
            record.awaits_verdict = True
        self._with_news.clear()
        self._urgent.clear()

    def resend_from(self, ref: AttemptRef, sequence_number: int) -> None:
        record = self.find(ref)
        if record is not None:
            record.resend_from(sequence_number)
            self._note(record)

    def keep(self, ref: AttemptRef) -> None:
        record = self.find(ref)
        if record is not None:
            record.awaits_verdict = False
            self._note(record)

    def take_news(self, max_tokens: int = MAX_BATCH_TOKENS, *, only_urgent: bool = False) -> list[AttemptNews]:
        """The next batch, in the order in which the news came."""
        news = []
        for sequence_id, record in list((self._urgent if only_urgent else self._with_news).items()):
            if max_tokens <= 0:
                break
            news.append(record.take(max_tokens))
            taken = news[-1].delta
            max_tokens -= len(taken.token_ids) if taken is not None else 0
            if not record.has_news:
                del self._with_news[sequence_id]
                self._urgent.pop(sequence_id, None)
        return news

    def _new_record(self, ref: AttemptRef, *, num_prior: int) -> AttemptRecord:
        # Unique per session too: after a reset the engine may still hold the old session's sequences.
        sequence_id = f"{ref.generation_id}/{ref.attempt}@{self._session_id}"
        record = AttemptRecord(ref=ref, sequence_id=sequence_id, num_prior=num_prior)
        self._by_generation[ref.generation_id] = record
        self._by_sequence[sequence_id] = record
        return record

    def _note(self, record: AttemptRecord) -> None:
        if record.has_news:
            self._with_news[record.sequence_id] = record
            if record.is_urgent:
                self._urgent[record.sequence_id] = record

    def _drop(self, record: AttemptRecord) -> str | None:
        """Removes every trace; returns the sequence to abort if it still runs."""
        del self._by_generation[record.ref.generation_id]
        del self._by_sequence[record.sequence_id]
        self._with_news.pop(record.sequence_id, None)
        self._urgent.pop(record.sequence_id, None)
        return record.sequence_id if record.end is None else None
