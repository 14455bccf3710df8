"""What the worker's service process and an engine say to each other. Pure.

Nothing outside `gpu_worker.engine` knows which engine runs. A *sequence* is the engine-side state of one attempt;
its id is unique per attempt, so an id is never reused while an abort of it is under way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from service_kit.delta import Delta
from service_kit.sampling import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """One attempt to run.

    `prompt_token_ids` is the original prompt; `output_token_ids` the output of earlier attempts, which is part of the
    context but never taken for prompt: sampling positions, limits, stop matching, numbering and usage count it as output.
    """

    sequence_id: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int
    """Class rank: 0 INTERACTIVE, 1 STANDARD, 2 BATCH. Lower goes first."""
    nonce: int
    """64-bit number of the attempt; the simulated engine mixes it into every token it makes."""
    prefix_salt: str = ""
    """Cached prefixes are shared among sequences of equal salt only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Unix times in seconds of one sequence's life in the engine; 0 where it did not come so far."""

    added: float
    prefill_started: float
    first_token: float
    finished: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFinish:
    """The engine's last word about a sequence: either `reason` or `failure`, never both.

    `prompt_tokens` is the original prompt, `output_tokens` the last sequence number over all attempts.
    `matched_stop` is the stop string that ended the output.
    """

    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    timings: Timings
    reason: FinishReason | None = None
    failure: str | None = None
    matched_stop: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutput:
    """What one step added to one sequence; `delta` is None when it numbered no token. Not both None."""

    sequence_id: str
    delta: Delta | None = None
    finish: SequenceFinish | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChanges:
    """Prefix digests (`service_kit.prefix_hash.digest_of`) of blocks that came to and left the cache, host tier included."""

    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """All outputs of one engine step."""

    step: int
    outputs: tuple[SequenceOutput, ...]
    cache_changes: CacheChanges = CacheChanges()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """How full the engine is, as of its last step."""

    step: int
    num_running: int
    num_waiting: int
    max_running: int
    """Limit of sequences in one batch."""
    largest_batch: int
    """Most sequences in one step since the start."""
    num_free_blocks: int
    """Blocks that nobody holds, cached ones that can be evicted included."""
    num_blocks: int
    block_size: int
    kv_waste: float
    """Share of slots in allocated blocks that hold no token, 0 to 1."""
    room_blocks: tuple[int, int, int] = (0, 0, 0)
    """Blocks that a new sequence of class 0, 1, 2 could get: free ones, and those that only lower classes hold, without
    what waits in its own or a higher class."""
    num_preempted: int = 0
    """Since the start, as all counters below."""
    num_cached_blocks: int = 0
    """Blocks that can be found by their hash now, host tier included."""
    num_computed_prompt_tokens: int = 0
    """Tokens computed to fill caches: prompts, logged output of earlier attempts, and what was preempted."""
    num_cached_prompt_tokens: int = 0
    """Tokens that did not have to be computed, because their blocks were found."""
    num_blocks_to_host: int = 0
    num_blocks_from_host: int = 0
    num_failed: int = 0
    """Sequences that ended with a failure."""
    num_draft_steps: int = 0
    """How often a step verified proposed tokens of a sequence; the two below divided by it are per step."""
    num_draft_tokens: int = 0
    """Proposed tokens that were verified."""
    num_accepted_draft_tokens: int = 0
    """Of these, tokens that the model drew as well."""
    is_speculating: bool = False
    """Whether proposing paid when it was last considered."""
    num_speculation_stops: int = 0
    """How often it went off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What the engine serves; announced once, when it is ready."""

    engine: str
    model: str
    model_revision: str
    precision: str
    context_length: int
    vocab_size: int
    num_blocks: int
    block_size: int
    max_running: int
    is_batch_invariant: bool = False
    """Whether the logits of a position are the same bits in any batch, chunking and cache state."""
    kv_dtype: str = ""
    """What keys and values are stored as; all workers of a model need the same. Empty where nothing is stored."""
    details: dict[str, str] = field(default_factory=dict)
    """Free facts for logs: device, threads, attention backend."""


class RefusedSequenceError(Exception):
    """The engine can never run this sequence (too long, a token outside the vocabulary); the text says why."""


NoteUntried = Callable[[Sequence[str]], None]
"""Hears, before a step computes anything, which sequences it computes that have not made a token in this engine yet. Should
the step be the engine's last, they are the suspects."""


def note_nothing(_sequence_ids: Sequence[str]) -> None:
    """`NoteUntried` where nobody asks."""


class Engine(Protocol):
    """One model and its batch. Single-threaded: every call comes from the engine process's loop."""

    def capabilities(self) -> Capabilities: ...

    def add(self, spec: SequenceSpec) -> None:
        """Takes a sequence in; a repeated id changes nothing. Raises RefusedSequenceError."""

    def abort(self, sequence_id: str) -> None:
        """Ends a sequence; its last output, with reason CANCELLED, comes with the next step. Unknown ids are ignored."""

    def has_work(self) -> bool:
        """Whether `step` would do anything."""

    def step(self) -> StepOutput:
        """Runs one step over the batch."""

    def load_report(self) -> LoadReport: ...
