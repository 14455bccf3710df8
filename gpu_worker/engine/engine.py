"""The native engine: a step is schedule, move blocks, run, number, and nothing else happens in between. No torch."""

import time
from collections.abc import Callable, Iterable, Sequence

import structlog

from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.engine.execution import Executor, Sampled, SampleFailure
from gpu_worker.engine.flight import Flight
from gpu_worker.engine.intake import check_spec, new_sequence
from gpu_worker.engine.live_sequence import LiveSequence, merge
from gpu_worker.engine.live_sequences import LiveSequences
from gpu_worker.engine.plan_runner import PlanRunner, describe
from gpu_worker.engine.port import (
    Capabilities,
    LoadReport,
    NoteUntried,
    RefusedSequenceError,
    SequenceOutput,
    SequenceSpec,
    StepOutput,
    note_nothing,
)
from gpu_worker.engine.sequence import StepPlan
from gpu_worker.engine.step_scheduler import NeverFitsError, StepLimits, StepScheduler
from gpu_worker.engine.text import OutputStage, StopRules, TokenTable
from gpu_worker.speculation.port import NO_DRAFTS, Drafts
from service_kit.prefix_hash import model_fingerprint

log = structlog.get_logger()


class NativeEngine:
    """Implements `gpu_worker.engine.port.Engine` over an executor.

    Over an executor that launches, the next step is planned and launched before the one that runs is waited for; its tokens
    are numbered a step later, and what was computed behind a sequence's end is dropped.
    """

    def __init__(
        self,
        *,
        executor: Executor,
        capabilities: Capabilities,
        limits: StepLimits,
        table: TokenTable,
        eos_token_ids: Iterable[int],
        clock: Callable[[], float] = time.time,
        num_host_blocks: int = 0,
        timer: Callable[[], float] = time.perf_counter,
        note_untried: NoteUntried = note_nothing,
        known_steps: Iterable[tuple[StepPlan, float]] = (),
        drafts: Drafts | None = None,
    ) -> None:
        """`known_steps`: plans that the executor has run before, and their seconds. `drafts`: None for one token per sequence
        and step."""
        self._capabilities = capabilities
        self._fingerprint = model_fingerprint(revision=capabilities.model_revision, precision=capabilities.precision)
        self._pool = BlockPool(num_blocks=capabilities.num_blocks, block_size=capabilities.block_size)
        self._live = LiveSequences()
        self._drafts = drafts
        if drafts is not None:
            drafts.bind(self._live.request_behind)
        # Proposals look at the newest tokens, so that nothing can be planned without them.
        self._runner = PlanRunner(executor, self._live, may_launch=drafts is None)
        self._scheduler = StepScheduler(pool=self._pool, limits=limits, num_host_blocks=num_host_blocks, drafts=drafts)
        for plan, seconds in known_steps:
            self._scheduler.observe(plan, seconds)
        self._table = table
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self._timer = timer
        self._note_untried = note_untried
        self._ending: list[str] = []
        self._flight: Flight | None = None
        self._last_end = 0.0
        self._step = 0
        self._largest_batch = 0
        self._num_failed = 0

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def add(self, spec: SequenceSpec) -> None:
        if self._live.has_seen(spec.sequence_id):
            return
        check_spec(spec, self._capabilities)
        rules = StopRules.from_sampling(spec.sampling, self._eos_token_ids)
        live = LiveSequence(
            spec=spec,
            stage=OutputStage(self._table, rules, prior_output=spec.output_token_ids),
            sequence=new_sequence(spec, fingerprint=self._fingerprint),
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
        flight = self._flight or self._begin(outputs)
        self._flight = None
        if flight.launch is not None:
            self._scheduler.suppose(flight.plan)
            ahead = self._begin(outputs, behind=flight)
            self._flight = ahead if ahead.planned else None
        outputs += self._finish(flight)
        return StepOutput(step=self._step, outputs=tuple(outputs), cache_changes=self._scheduler.take_cache_changes())

    def load_report(self) -> LoadReport:
        scheduler, pool = self._scheduler, self._pool
        drafted = self._drafts.counts if self._drafts is not None else NO_DRAFTS
        num_slots = (pool.num_blocks - pool.num_free) * pool.block_size
        return LoadReport(
            step=self._step,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            max_running=self._capabilities.max_running,
            largest_batch=self._largest_batch,
            num_free_blocks=pool.num_free,
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            kv_waste=1 - scheduler.num_computed_tokens / num_slots if num_slots else 0.0,
            room_blocks=scheduler.room_blocks,
            num_preempted=scheduler.num_preempted,
            num_cached_blocks=scheduler.num_cached_blocks,
            num_computed_prompt_tokens=scheduler.num_computed_prompt_tokens,
            num_cached_prompt_tokens=scheduler.num_cached_prompt_tokens,
            num_blocks_to_host=scheduler.num_blocks_to_host,
            num_blocks_from_host=scheduler.num_blocks_from_host,
            num_failed=self._num_failed,
            num_draft_steps=drafted.num_steps,
            num_draft_tokens=drafted.num_proposed,
            num_accepted_draft_tokens=drafted.num_accepted,
            is_speculating=drafted.is_on,
            num_speculation_stops=drafted.num_stops,
        )

    def check_integrity(self) -> None:
        """Raises unless blocks and sequences agree; for tests and debugging."""
        self._scheduler.check_integrity()

    def _move(self, plan: StepPlan) -> list[SequenceOutput]:
        """Copies the plan's blocks. When that fails, the sequences that would read the copies end with a failure."""
        if not plan.moves:
            return []
        error = self._runner.move(plan.moves, step=self._step)
        if error is None:
            return []
        filled = {block for _, block in (*plan.moves.from_host, *plan.moves.duplicated)}
        concerned = [live for live in self._live.values() if not filled.isdisjoint(live.sequence.block_table)]
        outputs = [self._fail(live, f"moving blocks failed: {describe(error)}") for live in concerned]
        # What was to be saved is not in the host tier, so nothing that nobody holds may be found any more.
        self._scheduler.drop_cached()
        return outputs

    def _begin(self, outputs: list[SequenceOutput], behind: Flight | None = None) -> Flight:
        """Plans the next step and moves its blocks; launches it if that can be done, `behind` one that still runs."""
        plan = self._scheduler.schedule()
        if plan.preempted:
            log.info("sequences_preempted", step=self._step, sequence_ids=plan.preempted)
        concerned = plan.sequences if behind is None else (*behind.planned, *plan.sequences)
        known = ((each.sequence_id, self._live.get(each.sequence_id)) for each in concerned)
        untried = {sequence_id: live for sequence_id, live in known if live is not None and not live.first_token}
        self._note_untried(list(untried))
        planned = plan.sequences
        if failed := self._move(plan):
            outputs += failed
            planned = tuple(each for each in planned if each.sequence_id in self._live)
        self._largest_batch = max(self._largest_batch, len(planned))
        now = self._clock()
        for live in untried.values():
            live.prefill_started = live.prefill_started or now
        return Flight(
            plan=plan, planned=planned, started=self._timer(), launch=self._runner.launch(planned, step=self._step)
        )

    def _finish(self, flight: Flight) -> list[SequenceOutput]:
        if not flight.planned:
            return []
        plan = flight.plan
        started = max(flight.started, self._last_end) if flight.launch is not None else self._timer()
        results = self._runner.outcomes(flight, step=self._step)
        self._last_end = self._timer()
        failures = {sequence_id: result for sequence_id, result in results.items() if isinstance(result, SampleFailure)}
        if len(flight.planned) == len(plan.sequences) and not failures:
            # Otherwise the time is not that of the plan.
            self._scheduler.observe(plan, self._last_end - started)
        outputs = [
            self._fail(self._live[sequence_id], result.reason, is_suspect=result.is_suspect)
            for sequence_id, result in failures.items()
        ]
        now = self._clock()
        taken: dict[str, list[int]] = {}
        for sequence_id, drawn in results.items():
            if isinstance(drawn, SampleFailure):
                continue
            live = self._live[sequence_id]
            live.first_token = live.first_token or now
            output, num_taken = self._push(live, drawn)
            taken[sequence_id] = [sampled.token_id for sampled in drawn[:num_taken]]
            if output is not None:
                outputs.append(output)
        record = self._scheduler.update if flight.launch is None else self._scheduler.confirm
        record(plan, taken)
        for output in outputs:
            if output.finish is not None and output.sequence_id in self._live:
                self._scheduler.remove(output.sequence_id)
                self._forget(self._live[output.sequence_id])
        return outputs

    def _push(self, live: LiveSequence, drawn: Sequence[Sampled]) -> tuple[SequenceOutput | None, int]:
        """What the tokens cause, and how many were taken: nothing behind the end of the output."""
        outputs: list[SequenceOutput] = []
        num_taken = 0
        try:
            if len(drawn) == 1:
                return live.push(drawn[0].token_id, drawn[0].logprob), 1
            for sampled in drawn:
                num_taken += 1
                output = live.push(sampled.token_id, sampled.logprob)
                if output is not None:
                    outputs.append(output)
                    if output.finish is not None:
                        break
        except Exception as error:
            log.exception("output_failed", step=self._step, sequence_id=live.spec.sequence_id)
            outputs.append(self._fail(live, f"the output stage failed: {describe(error)}", is_suspect=False))
        return merge(outputs), num_taken

    def _fail(self, live: LiveSequence, failure: str, *, is_suspect: bool = True) -> SequenceOutput:
        """`is_suspect`: what was computed of it may be wrong."""
        self._num_failed += 1
        if is_suspect:
            self._scheduler.discard(live.spec.sequence_id)
        else:
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
        sequence_id = live.spec.sequence_id
        self._runner.forget(sequence_id)
        self._live.finish(sequence_id)
