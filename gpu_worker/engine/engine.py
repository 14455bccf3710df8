"""The native engine: a step is schedule, run, sample, number, and nothing else happens in between."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import structlog
import torch

from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.engine.live_sequence import LiveSequence
from gpu_worker.engine.loading import load_parts
from gpu_worker.engine.port import (
    Capabilities,
    LoadReport,
    RefusedSequenceError,
    SequenceOutput,
    SequenceSpec,
    StepOutput,
)
from gpu_worker.engine.sampler import SampleRequest, sample
from gpu_worker.engine.sequence import Sequence, StepPlan
from gpu_worker.engine.settings import EngineSettings
from gpu_worker.engine.step_scheduler import NeverFitsError, StepLimits, StepScheduler
from gpu_worker.engine.text import OutputStage, StopRules, TokenTable

_MAX_FINISHED_IDS = 4096

log = structlog.get_logger()


class Runner(Protocol):
    """Computes plans; ModelRunner is the real one."""

    def run(self, plan: StepPlan) -> torch.Tensor:
        """Logits of the sampled sequences in plan order. May raise, and may then be asked again for a part of the plan."""


class NativeEngine:
    """Implements `gpu_worker.engine.port.Engine` over a model of our own.

    When computing a step fails, its sequences are computed one by one: those that fail alone end with a failure, the
    others lose nothing.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        capabilities: Capabilities,
        limits: StepLimits,
        table: TokenTable,
        eos_token_ids: Iterable[int],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._runner = runner
        self._capabilities = capabilities
        self._pool = BlockPool(num_blocks=capabilities.num_blocks, block_size=capabilities.block_size)
        self._scheduler = StepScheduler(pool=self._pool, limits=limits)
        self._table = table
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self._live: dict[str, LiveSequence] = {}
        self._ending: list[str] = []
        # Remembered so that an add repeated after the end does not run the sequence again; the oldest is forgotten.
        self._finished_ids: OrderedDict[str, None] = OrderedDict()
        self._step = 0
        self._largest_batch = 0

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def add(self, spec: SequenceSpec) -> None:
        if spec.sequence_id in self._live or spec.sequence_id in self._finished_ids:
            return
        self._check(spec)
        rules = StopRules.from_sampling(spec.sampling, self._eos_token_ids)
        live = LiveSequence(
            spec=spec,
            stage=OutputStage(self._table, rules, prior_output=spec.output_token_ids),
            sequence=_new_sequence(spec),
            clock=self._clock,
            added=self._clock(),
        )
        if live.is_complete:
            self._ending.append(spec.sequence_id)
        else:
            try:
                self._scheduler.add(live.sequence)
            except NeverFitsError as error:
                raise RefusedSequenceError(str(error)) from error
        self._live[spec.sequence_id] = live

    def abort(self, sequence_id: str) -> None:
        live = self._live.get(sequence_id)
        if live is not None and not live.is_aborted and not live.is_complete:
            live.is_aborted = True
            self._ending.append(sequence_id)

    def has_work(self) -> bool:
        return bool(self._live)

    def step(self) -> StepOutput:
        self._step += 1
        outputs = [self._end(self._live[sequence_id]) for sequence_id in self._ending]
        self._ending.clear()
        plan = self._scheduler.schedule()
        if plan.preempted:
            log.info("sequences_preempted", step=self._step, sequence_ids=plan.preempted)
        if plan.sequences:
            outputs += self._compute(plan)
        return StepOutput(step=self._step, outputs=tuple(outputs))

    def load_report(self) -> LoadReport:
        num_slots = (self._pool.num_blocks - self._pool.num_free) * self._pool.block_size
        return LoadReport(
            step=self._step,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            max_running=self._capabilities.max_running,
            largest_batch=self._largest_batch,
            num_free_blocks=self._pool.num_free,
            num_blocks=self._pool.num_blocks,
            block_size=self._pool.block_size,
            kv_waste=1 - self._scheduler.num_computed_tokens / num_slots if num_slots else 0.0,
            num_preempted=self._scheduler.num_preempted,
        )

    def check_integrity(self) -> None:
        """Raises unless blocks and sequences agree; for tests and debugging."""
        self._scheduler.check_integrity()

    def _check(self, spec: SequenceSpec) -> None:
        """Raises RefusedSequenceError for what can never run."""
        context_length, vocab_size = self._capabilities.context_length, self._capabilities.vocab_size
        if not spec.prompt_token_ids:
            raise RefusedSequenceError("the prompt has no tokens")
        for token_id in (*spec.prompt_token_ids, *spec.output_token_ids):
            if not 0 <= token_id < vocab_size:
                raise RefusedSequenceError(f"token {token_id} is outside the vocabulary of {vocab_size}")
        num_tokens = len(spec.prompt_token_ids) + spec.sampling.max_output_tokens
        if num_tokens > context_length:
            raise RefusedSequenceError(
                f"prompt and max_output_tokens are {num_tokens} tokens together, the context holds {context_length}"
            )

    def _compute(self, plan: StepPlan) -> list[SequenceOutput]:
        self._largest_batch = max(self._largest_batch, len(plan.sequences))
        now = self._clock()
        for planned in plan.sequences:
            live = self._live[planned.sequence_id]
            live.prefill_started = live.prefill_started or now
        sampled, failures = self._run(plan)
        outputs = [self._fail(self._live[sequence_id], failure) for sequence_id, failure in failures.items()]
        self._scheduler.update(plan, sampled)
        now = self._clock()
        for sequence_id, token_id in sampled.items():
            live = self._live[sequence_id]
            live.first_token = live.first_token or now
            output = self._push(live, token_id)
            if output is not None:
                outputs.append(output)
        return outputs

    def _run(self, plan: StepPlan) -> tuple[dict[str, int], dict[str, str]]:
        """Drawn tokens and failure texts by sequence."""
        try:
            return self._run_once(plan)
        except Exception as error:
            # Whatever the model raised, it must not end the sequences that did not cause it.
            log.exception("step_failed", step=self._step, num_sequences=len(plan.sequences))
            if len(plan.sequences) == 1:
                return {}, {plan.sequences[0].sequence_id: f"the step failed: {type(error).__name__}: {error}"}
        sampled: dict[str, int] = {}
        failures: dict[str, str] = {}
        for planned in plan.sequences:
            sampled_alone, failures_alone = self._run(plan.only(planned.sequence_id))
            sampled |= sampled_alone
            failures |= failures_alone
        return sampled, failures

    def _run_once(self, plan: StepPlan) -> tuple[dict[str, int], dict[str, str]]:
        logits = self._runner.run(plan)
        sequence_ids = [planned.sequence_id for planned in plan.sequences if planned.is_sampled]
        tokens = sample(logits, [_sample_request(self._live[sequence_id]) for sequence_id in sequence_ids])
        sampled: dict[str, int] = {}
        failures: dict[str, str] = {}
        for sequence_id, token_id in zip(sequence_ids, tokens, strict=True):
            if token_id is None:
                failures[sequence_id] = "the model's logits are not finite"
            else:
                sampled[sequence_id] = token_id
        return sampled, failures

    def _push(self, live: LiveSequence, token_id: int) -> SequenceOutput | None:
        try:
            output = live.push(token_id)
        except Exception as error:
            log.exception("output_failed", step=self._step, sequence_id=live.spec.sequence_id)
            return self._fail(live, f"the output stage failed: {type(error).__name__}: {error}")
        if output is not None and output.finish is not None:
            self._scheduler.remove(live.spec.sequence_id)
            self._forget(live)
        return output

    def _fail(self, live: LiveSequence, failure: str) -> SequenceOutput:
        self._scheduler.remove(live.spec.sequence_id)
        self._forget(live)
        return live.fail(failure)

    def _end(self, live: LiveSequence) -> SequenceOutput:
        """The last output of a sequence that was aborted, or was complete when it came."""
        self._forget(live)
        if not live.is_aborted:
            return live.complete()
        self._scheduler.remove(live.spec.sequence_id)
        return live.cancel()

    def _forget(self, live: LiveSequence) -> None:
        del self._live[live.spec.sequence_id]
        self._finished_ids[live.spec.sequence_id] = None
        if len(self._finished_ids) > _MAX_FINISHED_IDS:
            self._finished_ids.popitem(last=False)


def _new_sequence(spec: SequenceSpec) -> Sequence:
    return Sequence(
        sequence_id=spec.sequence_id,
        token_ids=[*spec.prompt_token_ids, *spec.output_token_ids],
        num_prompt_tokens=len(spec.prompt_token_ids),
        max_total_tokens=len(spec.prompt_token_ids) + spec.sampling.max_output_tokens,
        priority=spec.priority,
    )


def _sample_request(live: LiveSequence) -> SampleRequest:
    sampling = live.spec.sampling
    return SampleRequest(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        position=live.next_position,
    )


def load_native_engine(
    directory: Path, *, settings: EngineSettings, clock: Callable[[], float] = time.time
) -> NativeEngine:
    """The engine for the model in `directory`, warmed up. Raises ModelFilesError, EngineStartError."""
    parts = load_parts(directory, settings)
    return NativeEngine(
        runner=parts.runner,
        capabilities=parts.capabilities,
        limits=settings.step_limits(),
        table=parts.table,
        eos_token_ids=parts.manifest.eos_token_ids,
        clock=clock,
    )
