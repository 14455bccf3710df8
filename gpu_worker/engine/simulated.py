"""An engine without a model: real batching, blocks, numbering and stop rules; computed tokens; faults on request.

All probability lies on the computed token: its log probability is 0, and it alone is among the most probable ones. So
temperature, penalties, biases and the limits of the choice (top-k, top-p, min-p) have nothing to act on.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gpu_worker.engine.port import (
    Capabilities,
    LoadReport,
    NoteUntried,
    RefusedSequenceError,
    SequenceFinish,
    SequenceOutput,
    SequenceSpec,
    StepOutput,
    Timings,
    note_nothing,
)
from gpu_worker.engine.simulated_faults import NO_FAULTS, Faults, InvalidFaultError, read_faults
from gpu_worker.engine.simulated_plan import SimulatedBatch, SimulatedSequence
from gpu_worker.engine.simulated_settings import InvalidSettingsError, SimulatedSettings
from gpu_worker.engine.simulated_tokens import (
    TokenMode,
    certain_logprob,
    context_hash,
    echoed_token,
    printable_alphabet,
    simulated_number,
)
from gpu_worker.engine.text import OutputStage, StopRules, TokenTable
from service_kit.delta import Delta, extend_chain, join
from service_kit.model_manifest import ModelManifest, read_manifest
from service_kit.prefix_hash import BlockHash, block_hashes, model_fingerprint, prefix_root
from service_kit.sampling import FinishReason

_HANG_TURN_S = 60.0
_CRASH_EXIT_CODE = 70


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedWorld:
    """What the engine does to the world outside; tests give their own."""

    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    exit_process: Callable[[int], None] = os._exit


@dataclass(slots=True)
class _Running:
    """State of one attempt beside its place in the batch."""

    spec: SequenceSpec
    stage: OutputStage
    faults: Faults
    context: int
    added: float
    num_made: int = 0
    prefill_started: float = 0.0
    first_token: float = 0.0
    slot: SimulatedSequence = field(init=False)


def load_simulated_engine(
    directory: Path,
    *,
    settings: SimulatedSettings,
    world: SimulatedWorld | None = None,
    note_untried: NoteUntried = note_nothing,
) -> "SimulatedEngine":
    """The engine for a model directory of precision "sim". Raises ModelFilesError, UnsupportedTokenizerError."""
    table = TokenTable.from_directory(directory)
    world = world or SimulatedWorld()
    if settings.load_s:
        world.sleep(settings.load_s)
    return SimulatedEngine(read_manifest(directory), table, settings, world, note_untried)


class SimulatedEngine:
    """`gpu_worker.engine.port.Engine` without a model."""

    def __init__(
        self,
        manifest: ModelManifest,
        table: TokenTable,
        settings: SimulatedSettings,
        world: SimulatedWorld,
        note_untried: NoteUntried = note_nothing,
    ) -> None:
        self._manifest = manifest
        self._fingerprint = model_fingerprint(revision=manifest.revision, precision=manifest.precision)
        self._table = table
        self._settings = settings
        self._world = world
        self._note_untried = note_untried
        self._alphabet = printable_alphabet(table)
        if not self._alphabet:
            raise InvalidSettingsError(f"model {manifest.model}: no token is a printable character")
        if settings.eos_one_in and not manifest.eos_token_ids:
            raise InvalidSettingsError(f"eos_one_in: model {manifest.model} has no EOS token")
        self._batch = SimulatedBatch(
            num_blocks=settings.num_blocks, block_size=settings.block_size, max_running=settings.max_running
        )
        self._sequences: dict[str, _Running] = {}
        self._ended: list[SequenceOutput] = []
        self._step = 0
        self._arrivals = 0

    def capabilities(self) -> Capabilities:
        return Capabilities(
            engine="simulated",
            model=self._manifest.model,
            model_revision=self._manifest.revision,
            precision=self._manifest.precision,
            context_length=self._manifest.context_length,
            vocab_size=self._manifest.vocab_size,
            num_blocks=self._settings.num_blocks,
            block_size=self._settings.block_size,
            max_running=self._settings.max_running,
            details={"token_mode": str(self._settings.token_mode)},
        )

    def add(self, spec: SequenceSpec) -> None:
        if spec.sequence_id in self._sequences:
            return
        self._refuse_impossible(spec)
        rules = StopRules.from_sampling(spec.sampling, self._manifest.eos_token_ids)
        state = _Running(
            spec=spec,
            stage=OutputStage(self._table, rules, prior_output=spec.output_token_ids),
            faults=self._faults_of(spec),
            context=context_hash(spec.prompt_token_ids, spec.output_token_ids),
            added=self._world.clock(),
        )
        self._sequences[spec.sequence_id] = state
        self._arrivals += 1
        state.slot = SimulatedSequence(
            sequence_id=spec.sequence_id,
            rank=(spec.priority, self._arrivals),
            num_tokens=len(spec.prompt_token_ids) + len(spec.output_token_ids),
            hashes=self._hashes_of(spec),
        )
        self._batch.add(state.slot)
        if (reason := self._reached_end(state)) is not None:
            self._ended.append(self._finish(state, None, reason))

    def abort(self, sequence_id: str) -> None:
        state = self._sequences.get(sequence_id)
        if state is not None:
            self._ended.append(self._finish(state, state.stage.flush().delta, FinishReason.CANCELLED))

    def has_work(self) -> bool:
        return bool(self._sequences or self._ended)

    def step(self) -> StepOutput:
        self._step += 1
        plan = [
            (self._sequences[slot.sequence_id], chunk) for slot, chunk in self._batch.plan(self._settings.step_tokens)
        ]
        self._note_untried([state.spec.sequence_id for state, _ in plan if not state.num_made])
        self._spend_time(plan)
        outputs, self._ended = self._ended, []
        for state, chunk in plan:
            if self._batch.advance(state.slot, chunk):
                output = self._generate(state)
                outputs += [output] if output else []
        return StepOutput(step=self._step, outputs=tuple(outputs), cache_changes=self._batch.cache.take_changes())

    def load_report(self) -> LoadReport:
        batch = self._batch
        return LoadReport(
            step=self._step,
            num_running=batch.num_running,
            num_waiting=batch.num_waiting,
            max_running=self._settings.max_running,
            largest_batch=batch.largest_batch,
            num_free_blocks=batch.num_free_blocks,
            num_blocks=self._settings.num_blocks,
            block_size=self._settings.block_size,
            kv_waste=batch.waste(),
            num_preempted=batch.num_preempted,
            room_blocks=batch.room_blocks(),
            num_cached_blocks=len(batch.cache),
            num_computed_prompt_tokens=batch.num_computed_prompt_tokens,
            num_cached_prompt_tokens=batch.num_cached_prompt_tokens,
        )

    def _refuse_impossible(self, spec: SequenceSpec) -> None:
        if not spec.prompt_token_ids:
            raise RefusedSequenceError("the prompt is empty")
        vocab_size = self._manifest.vocab_size
        if any(not 0 <= token_id < vocab_size for token_id in (*spec.prompt_token_ids, *spec.output_token_ids)):
            raise RefusedSequenceError(f"a token id lies outside the vocabulary of {vocab_size}")
        longest = len(spec.prompt_token_ids) + spec.sampling.max_output_tokens
        if longest > self._manifest.context_length:
            raise RefusedSequenceError(f"{longest} tokens exceed the context of {self._manifest.context_length}")
        if longest > self._settings.num_blocks * self._settings.block_size:
            raise RefusedSequenceError(f"{longest} tokens exceed {self._settings.num_blocks} blocks")

    def _hashes_of(self, spec: SequenceSpec) -> list[BlockHash]:
        """Of what is known when the sequence comes: its prompt and logged output."""
        if not self._settings.has_prefix_cache:
            return []
        root = prefix_root(model_fingerprint=self._fingerprint, tenant_salt=spec.prefix_salt)
        return block_hashes(root, [*spec.prompt_token_ids, *spec.output_token_ids], self._settings.block_size)

    def _faults_of(self, spec: SequenceSpec) -> Faults:
        if not self._settings.has_prompt_faults:
            return NO_FAULTS
        text = b"".join(map(self._table.bytes_of, spec.prompt_token_ids)).decode(errors="replace")
        try:
            return read_faults(text)
        except InvalidFaultError as error:
            raise RefusedSequenceError(str(error)) from error

    def _spend_time(self, plan: list[tuple[_Running, int]]) -> None:
        """Waits as long as a real step would take; crashes and hangs where a prompt asks for it."""
        num_prefill = 0
        seconds = 0.0
        for state, chunk in plan:
            if not state.prefill_started:
                state.prefill_started = self._world.clock()
            if not state.num_made or chunk > 1:
                num_prefill += chunk
            if state.faults is NO_FAULTS:
                continue
            if state.faults.crashes_now(num_made=state.num_made, is_resumed=bool(state.spec.output_token_ids)):
                self._world.exit_process(_CRASH_EXIT_CODE)
            while state.faults.hang:
                self._world.sleep(_HANG_TURN_S)
            seconds += state.faults.slow_s
        if self._settings.prefill_tokens_per_s:
            seconds += num_prefill / self._settings.prefill_tokens_per_s
        if self._settings.tokens_per_s and plan:
            seconds += 1 / self._settings.tokens_per_s
        if seconds:
            self._world.sleep(seconds)

    def _generate(self, state: _Running) -> SequenceOutput | None:
        token_id = self._next_token(state)
        state.context = extend_chain(state.context, (token_id,))
        state.num_made += 1
        if not state.first_token:
            state.first_token = self._world.clock()
        num_top = state.spec.sampling.logprobs
        delta = state.stage.push(token_id, None if num_top is None else certain_logprob(token_id, num_top)).delta
        reason = self._reached_end(state)
        if reason is None:
            return SequenceOutput(sequence_id=state.spec.sequence_id, delta=delta) if delta else None
        held = state.stage.flush().delta
        return self._finish(state, join(part for part in (delta, held) if part), reason)

    def _next_token(self, state: _Running) -> int:
        if self._settings.token_mode is TokenMode.ECHO:
            return echoed_token(
                state.spec.prompt_token_ids, state.stage.num_generated, bos_token_id=self._manifest.bos_token_id
            )
        nonce = state.spec.nonce if self._settings.token_mode is TokenMode.NONCE else 0
        number = simulated_number(state.context, seed=state.spec.sampling.seed, nonce=nonce)
        if self._settings.eos_one_in and (number >> 32) % self._settings.eos_one_in == 0:
            can_end = state.stage.num_generated >= state.spec.sampling.min_output_tokens
            if can_end:
                return self._manifest.eos_token_ids[0]
        return self._alphabet[number % len(self._alphabet)]

    @staticmethod
    def _reached_end(state: _Running) -> FinishReason | None:
        stage = state.stage
        if stage.stop is not None:
            return FinishReason.STOP
        return FinishReason.LENGTH if stage.num_generated >= state.spec.sampling.max_output_tokens else None

    def _finish(self, state: _Running, delta: Delta | None, reason: FinishReason) -> SequenceOutput:
        """The sequence leaves every structure at once."""
        self._batch.remove(state.slot)
        del self._sequences[state.spec.sequence_id]
        finish = SequenceFinish(
            prompt_tokens=len(state.spec.prompt_token_ids),
            cached_prompt_tokens=min(state.slot.num_cached or 0, len(state.spec.prompt_token_ids)),
            output_tokens=state.stage.cursor.sequence_number,
            timings=Timings(
                added=state.added,
                prefill_started=state.prefill_started,
                first_token=state.first_token,
                finished=self._world.clock(),
            ),
            reason=reason,
            matched_stop=state.stage.stop.matched_stop if state.stage.stop else None,
        )
        return SequenceOutput(sequence_id=state.spec.sequence_id, delta=delta, finish=finish)
