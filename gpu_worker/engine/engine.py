"""The native engine: a step is schedule, move blocks, run, number, and nothing else happens in between. No torch."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import structlog

from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.engine.execution import (
    DeviceLostError,
    Executor,
    Launch,
    LaunchingExecutor,
    Sampled,
    SampleFailure,
    SampleRequest,
)
from gpu_worker.engine.flight import Flight, with_known_token
from gpu_worker.engine.live_sequence import LiveSequence, merge
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
from gpu_worker.engine.sequence import NUM_CLASSES, UNKNOWN_TOKEN, PlannedSequence, StepPlan
from gpu_worker.engine.sequence import Sequence as ScheduledSequence
from gpu_worker.engine.step_scheduler import NeverFitsError, StepLimits, StepScheduler
from gpu_worker.engine.text import OutputStage, StopRules, TokenTable
from gpu_worker.speculation.port import NO_DRAFTS, Drafts
from gpu_worker.speculation.verification import accept
from service_kit.prefix_hash import model_fingerprint, prefix_root

_MAX_FINISHED_IDS = 4096

log = structlog.get_logger()


class NativeEngine:
    """Implements `gpu_worker.engine.port.Engine` over an executor.

    Over an executor that launches, the next step is planned and launched before the one that runs is waited for; its tokens
    are numbered a step later, and what was computed behind a sequence's end is dropped.

    When computing a step fails, its sequences are computed again in halves: those that fail alone end with a failure, the
    others lose nothing.
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
        self._executor = executor
        self._capabilities = capabilities
        self._fingerprint = model_fingerprint(revision=capabilities.model_revision, precision=capabilities.precision)
        self._pool = BlockPool(num_blocks=capabilities.num_blocks, block_size=capabilities.block_size)
        self._drafts = drafts
        if drafts is not None:
            drafts.bind(self._request_behind)
        self._scheduler = StepScheduler(pool=self._pool, limits=limits, num_host_blocks=num_host_blocks, drafts=drafts)
        for plan, seconds in known_steps:
            self._scheduler.observe(plan, seconds)
        self._table = table
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self._timer = timer
        self._note_untried = note_untried
        self._live: dict[str, LiveSequence] = {}
        self._ending: list[str] = []
        # Remembered so that an add repeated after the end does not run the sequence again; the oldest is forgotten.
        self._finished_ids: OrderedDict[str, None] = OrderedDict()
        # Proposals look at the newest tokens, so that nothing can be planned without them.
        self._launcher = executor if isinstance(executor, LaunchingExecutor) and drafts is None else None
        self._flight: Flight | None = None
        self._last_end = 0.0
        self._step = 0
        self._largest_batch = 0
        self._num_failed = 0

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
            sequence=self._new_sequence(spec),
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
        )

    def check_integrity(self) -> None:
        """Raises unless blocks and sequences agree; for tests and debugging."""
        self._scheduler.check_integrity()

    def _check(self, spec: SequenceSpec) -> None:
        """Raises RefusedSequenceError for what can never run."""
        context_length, vocab_size = self._capabilities.context_length, self._capabilities.vocab_size
        if not spec.prompt_token_ids:
            raise RefusedSequenceError("the prompt has no tokens")
        biased = [token_id for token_id, _ in spec.sampling.logit_bias]
        for token_id in (*spec.prompt_token_ids, *spec.output_token_ids, *spec.sampling.stop_token_ids, *biased):
            if not 0 <= token_id < vocab_size:
                raise RefusedSequenceError(f"token {token_id} is outside the vocabulary of {vocab_size}")
        if not 0 <= spec.priority < NUM_CLASSES:
            raise RefusedSequenceError(f"class {spec.priority} is not one of {NUM_CLASSES}")
        num_tokens = len(spec.prompt_token_ids) + spec.sampling.max_output_tokens
        if num_tokens > context_length:
            raise RefusedSequenceError(
                f"prompt and max_output_tokens are {num_tokens} tokens together, the context holds {context_length}"
            )

    def _new_sequence(self, spec: SequenceSpec) -> ScheduledSequence:
        return ScheduledSequence(
            sequence_id=spec.sequence_id,
            token_ids=[*spec.prompt_token_ids, *spec.output_token_ids],
            num_prompt_tokens=len(spec.prompt_token_ids),
            max_total_tokens=len(spec.prompt_token_ids) + spec.sampling.max_output_tokens,
            priority=spec.priority,
            prefix_root=prefix_root(model_fingerprint=self._fingerprint, tenant_salt=spec.prefix_salt),
        )

    def _move(self, plan: StepPlan) -> list[SequenceOutput]:
        """Copies the plan's blocks. When that fails, the sequences that would read the copies end with a failure."""
        if not plan.moves:
            return []
        try:
            self._executor.move(plan.moves)
        except DeviceLostError:
            raise
        except Exception as error:
            log.exception("moving_blocks_failed", step=self._step)
            filled = {block for _, block in (*plan.moves.from_host, *plan.moves.duplicated)}
            concerned = [live for live in self._live.values() if not filled.isdisjoint(live.sequence.block_table)]
            outputs = [self._fail(live, f"moving blocks failed: {_describe(error)}") for live in concerned]
            # What was to be saved is not in the host tier, so nothing that nobody holds may be found any more.
            self._scheduler.drop_cached()
            return outputs
        return []

    def _begin(self, outputs: list[SequenceOutput], behind: Flight | None = None) -> Flight:
        """Plans the next step and moves its blocks; launches it if that can be done, `behind` one that still runs."""
        plan = self._scheduler.schedule()
        if plan.preempted:
            log.info("sequences_preempted", step=self._step, sequence_ids=plan.preempted)
        concerned = (*(behind.planned if behind is not None else ()), *plan.sequences)
        ids = dict.fromkeys(each.sequence_id for each in concerned)
        self._note_untried([each for each in ids if each in self._live and not self._live[each].first_token])
        outputs += self._move(plan)
        planned = tuple(each for each in plan.sequences if each.sequence_id in self._live)
        self._largest_batch = max(self._largest_batch, len(planned))
        now = self._clock()
        for each in planned:
            live = self._live[each.sequence_id]
            live.prefill_started = live.prefill_started or now
        return Flight(plan=plan, planned=planned, started=self._timer(), launch=self._launch(planned))

    def _launch(self, planned: Sequence[PlannedSequence]) -> Launch | None:
        """None when the plan has to be run by itself, with all its tokens known."""
        if self._launcher is None or not planned:
            return None
        requests = [
            self._request_behind(each.sequence_id, each.token_ids[-1:] if each.token_ids[-1] == UNKNOWN_TOKEN else ())
            for each in planned
            if each.is_sampled
        ]
        if not self._launcher.can_launch(requests):
            return None
        try:
            return self._launcher.launch(StepPlan(sequences=tuple(planned)), requests)
        except DeviceLostError:
            raise
        except Exception:
            log.exception("launch_failed", step=self._step, num_sequences=len(planned))
            return None

    def _outcomes(self, flight: Flight) -> dict[str, tuple[Sampled, ...] | SampleFailure]:
        """As `_run`, of the sequences that are still there."""
        if flight.launch is None:
            planned = [each for each in flight.planned if each.sequence_id in self._live]
            return self._run([with_known_token(each, self._live[each.sequence_id].sequence) for each in planned])
        sampled_ids = [each.sequence_id for each in flight.planned if each.is_sampled]
        drawn = zip(sampled_ids, flight.launch.collect(), strict=True)
        return {
            sequence_id: result if isinstance(result, SampleFailure) else (result,)
            for sequence_id, result in drawn
            if sequence_id in self._live
        }

    def _finish(self, flight: Flight) -> list[SequenceOutput]:
        if not flight.planned:
            return []
        plan = flight.plan
        started = max(flight.started, self._last_end) if flight.launch is not None else self._timer()
        results = self._outcomes(flight)
        self._last_end = self._timer()
        if len(flight.planned) == len(plan.sequences) and not any(
            isinstance(each, SampleFailure) for each in results.values()
        ):
            # Otherwise the time is not that of the plan.
            self._scheduler.observe(plan, self._last_end - started)
        outputs = [
            self._fail(self._live[sequence_id], result.reason, is_suspect=result.is_suspect)
            for sequence_id, result in results.items()
            if isinstance(result, SampleFailure)
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

    def _run(self, planned: Sequence[PlannedSequence]) -> dict[str, tuple[Sampled, ...] | SampleFailure]:
        """What was drawn for each sampled sequence, or why it cannot go on; also for those that only filled caches."""
        if not planned:
            return {}
        sampled = [each for each in planned if each.is_sampled]
        requests = [
            self._request_behind(each.sequence_id, each.draft_token_ids[:place])
            for each in sampled
            for place in range(each.num_sampled_rows)
        ]
        try:
            results = self._executor.run(StepPlan(sequences=tuple(planned)), requests)
            assert len(results) == len(requests), "one outcome for each sampled row"
            rows = iter(results)
            return {
                each.sequence_id: accept(each.draft_token_ids, tuple(islice(rows, each.num_sampled_rows)))
                for each in sampled
            }
        except DeviceLostError:
            raise
        except Exception as error:
            # Whatever the model raised, it must not end the sequences that did not cause it.
            log.exception("step_failed", step=self._step, num_sequences=len(planned))
            if any(each.num_drafts for each in planned):
                return self._run([each.without_drafts() for each in planned])
            if len(planned) == 1:
                return {planned[0].sequence_id: SampleFailure(reason=f"the step failed: {_describe(error)}")}
        half = len(planned) // 2
        return self._run(planned[:half]) | self._run(planned[half:])

    def _request_behind(self, sequence_id: str, draft_token_ids: tuple[int, ...]) -> SampleRequest:
        """For the token behind these proposed ones."""
        live = self._live[sequence_id]
        return SampleRequest(
            sequence_id=live.spec.sequence_id,
            sampling=live.spec.sampling,
            position=live.next_position + len(draft_token_ids),
            token_ids=live.sequence.token_ids,
            num_prompt_tokens=live.sequence.num_prompt_tokens,
            draft_token_ids=draft_token_ids,
            banned_token_ids=live.banned_behind(len(draft_token_ids)),
        )

    def _push(self, live: LiveSequence, drawn: Sequence[Sampled]) -> tuple[SequenceOutput | None, int]:
        """What the tokens cause, and how many were taken: nothing behind the end of the output."""
        outputs: list[SequenceOutput] = []
        num_taken = 0
        try:
            for sampled in drawn:
                num_taken += 1
                output = live.push(sampled.token_id, sampled.logprob)
                if output is not None:
                    outputs.append(output)
                    if output.finish is not None:
                        break
        except Exception as error:
            log.exception("output_failed", step=self._step, sequence_id=live.spec.sequence_id)
            outputs.append(self._fail(live, f"the output stage failed: {_describe(error)}", is_suspect=False))
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
        self._executor.forget(sequence_id)
        del self._live[sequence_id]
        self._finished_ids[sequence_id] = None
        if len(self._finished_ids) > _MAX_FINISHED_IDS:
            self._finished_ids.popitem(last=False)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
