"""What the engine asks of the part that computes: run a plan, draw the next tokens. Pure; torch is on the other side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from gpu_worker.engine.sequence import BlockMoves, StepPlan
from service_kit.delta import TokenLogprob
from service_kit.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """How the next token of one sequence is drawn.

    position: sequence number the token would get, from 1; with the seed it decides the random number. token_ids: prompt
    and output so far, a live list that only grows; the first num_prompt_tokens are the original prompt. draft_token_ids:
    proposed tokens that count as output here, as if they had been drawn. banned_token_ids cannot be drawn: the end tokens
    before min_output_tokens.
    """

    sequence_id: str
    sampling: SamplingParams
    position: int
    token_ids: Sequence[int]
    num_prompt_tokens: int
    draft_token_ids: tuple[int, ...] = ()
    banned_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The token that was drawn; `logprob` if the request asked for log probabilities."""

    token_id: int
    logprob: TokenLogprob | None = None


NOT_FINITE = "the model's logits are not finite"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFailure:
    """Why no token could be drawn for a sequence; its neighbours are not concerned.

    is_suspect: what was computed of it may be wrong, and nobody should find it in the cache.
    """

    reason: str
    is_suspect: bool = True


class DeviceLostError(Exception):
    """The device computes nothing any more for this process, which has to end: no part of a step would fare better."""


class Executor(Protocol):
    """A model, its KV memory and a sampler on one device."""

    def move(self, moves: BlockMoves) -> None:
        """Copies blocks; once per plan, before `run`."""

    def run(self, plan: StepPlan, requests: Sequence[SampleRequest]) -> list[Sampled | SampleFailure]:
        """Computes the plan and draws one token per sampled row, in plan order; `requests` are theirs.

        May raise anything, out of memory included, and may then be asked again for a part of the plan: writing the same
        KV twice changes nothing.
        """

    def forget(self, sequence_id: str) -> None:
        """Drops what is remembered between the steps of a sequence (penalty counts). Unknown ids are ignored."""


class Launch(Protocol):
    """A step that the device has been told to compute."""

    def collect(self) -> list[Sampled | SampleFailure]:
        """Waits for the step; one outcome per sampled row, in plan order. Once. Raises what the device reports."""


@runtime_checkable
class LaunchingExecutor(Executor, Protocol):
    """An executor that can begin a step before the one before it has ended, and hand the drawn tokens on by itself."""

    def can_launch(self, requests: Sequence[SampleRequest]) -> bool:
        """Whether tokens for these are drawn on the device. Of the token before, only its place need be known."""

    def launch(self, plan: StepPlan, requests: Sequence[SampleRequest]) -> Launch:
        """Begins to compute a plan without drafts. Where it holds UNKNOWN_TOKEN, as a sequence's last token, that is what
        the launch before drew for the sequence. May raise as `run` does; what it raises concerns this plan alone.

        At most one other launch has not been collected. `run` and `move` come after it in the device's order.
        """
