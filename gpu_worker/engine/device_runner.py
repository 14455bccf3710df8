"""Runs step plans on a device without waiting for it: the next step is prepared and started while one runs.

Pure decodes are replayed from recorded graphs, for the next larger recorded number of rows; what else a plan may hold is
computed kernel by kernel. A step's inputs travel in one page, its drawn ids in another, and the step after it takes them
from the device's memory.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.attention.port import SequenceRows, StepAttention
from gpu_worker.attention.triton import SECTION_NAMES, TritonAttention
from gpu_worker.attention.triton_step import Integers
from gpu_worker.engine.cuda_graphs import Graphs, padded_sizes
from gpu_worker.engine.device_draws import (
    NOT_FINITE_ID,
    DrawKind,
    DrawTensors,
    draw_rows,
    draw_sections,
    kind_of,
    read_sections,
)
from gpu_worker.engine.device_pages import Arriving, DrawnIds, StepPages
from gpu_worker.engine.draws import Draw
from gpu_worker.engine.execution import NOT_FINITE, DeviceLostError, Sampled, SampleFailure, SampleRequest
from gpu_worker.engine.model_runner import ModelRunner, pack_rows
from gpu_worker.engine.penalties import is_edited
from gpu_worker.engine.sampler import draw_of
from gpu_worker.engine.sequence import UNKNOWN_TOKEN, BlockMoves, StepPlan
from gpu_worker.models.port import PackedModel

_MODEL = "model"
_INTEGERS_PER_ROW = 24
_PAGE_SLACK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """The largest step: rows of any kind, sequences, and blocks of one sequence."""

    max_rows: int
    max_running: int
    blocks_per_sequence: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """A step on the device. sources: the row of the step before whose drawn id is meant, -1 where token_ids has it."""

    token_ids: torch.Tensor
    sources: torch.Tensor
    positions: torch.Tensor
    chosen: torch.Tensor
    draws: DrawTensors
    attend: StepAttention


@contextmanager
def telling_lost_devices() -> Iterator[None]:
    """Raises DeviceLostError for what a CUDA context does not recover from. Being out of memory is not among that."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise DeviceLostError(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLaunch:
    """Implements `gpu_worker.engine.execution.Launch`."""

    arriving: Arriving
    on_progress: Callable[[], None]

    def collect(self) -> list[Sampled | SampleFailure]:
        with telling_lost_devices():
            ids = self.arriving.wait()
        self.on_progress()
        return [
            SampleFailure(reason=NOT_FINITE) if token_id == NOT_FINITE_ID else Sampled(token_id=token_id)
            for token_id in ids
        ]


class DeviceRunner(ModelRunner):
    """Implements `gpu_worker.engine.execution.LaunchingExecutor` over a model whose layers are all attended by Triton."""

    def __init__(
        self,
        *,
        model: PackedModel,
        attention: TritonAttention,
        limits: DeviceLimits,
        graphs: Graphs,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(model=model, attention=attention, on_progress=on_progress)
        self._triton = attention
        self._limits = limits
        self._graphs = graphs
        self._sizes = padded_sizes(limits.max_running)
        num_tables = limits.max_running * limits.blocks_per_sequence
        num_integers = _INTEGERS_PER_ROW * (limits.max_rows + limits.max_running) + num_tables + _PAGE_SLACK
        self._pages = StepPages(num_integers=num_integers, device=model.device)
        self._drawn = DrawnIds(num_rows=limits.max_running, device=model.device)
        self._drawn_row_by_id: dict[str, int] = {}
        size = (limits.max_running, limits.vocab_size)
        self._logits = torch.zeros(size, dtype=torch.float32, device=model.device)

    @torch.inference_mode()
    def record_graphs(self) -> None:
        """Records every decode that `launch` replays, the largest first, whose memory the others share."""
        for size in reversed(self._sizes):
            self._report()
            inputs = self._recorded_inputs(size)
            self._graphs.record((_MODEL, size), lambda size=size, inputs=inputs: self._decode(inputs, size))  # type: ignore[misc]
            for kind in DrawKind:
                self._graphs.record(
                    (kind, size),
                    lambda kind=kind, size=size, inputs=inputs: self._draw(self._logits[:size], inputs, kind),  # type: ignore[misc]
                )

    def can_launch(self, requests: Sequence[SampleRequest]) -> bool:
        return all(
            not request.banned_token_ids and not is_edited(request.sampling) and request.sampling.logprobs is None
            for request in requests
        )

    def run(self, plan: StepPlan, requests: Sequence[SampleRequest]) -> list[Sampled | SampleFailure]:
        with telling_lost_devices():
            return super().run(plan, requests)

    def move(self, moves: BlockMoves) -> None:
        with telling_lost_devices():
            super().move(moves)

    @telling_lost_devices()
    @torch.inference_mode()
    def launch(self, plan: StepPlan, requests: Sequence[SampleRequest]) -> DeviceLaunch:
        draws = [draw_of(request, self._limits.vocab_size) for request in requests]
        size = self._graph_size(plan)
        inputs = self._send(plan, draws, size)
        kind = kind_of(draws)
        if size is not None:
            self._replay(size, kind)
        else:
            chosen = self._forward_rows(inputs)
            if draws:
                self._draw(self._model.logits(chosen), inputs, kind)
        sampled = [planned.sequence_id for planned in plan.sequences if planned.is_sampled]
        self._drawn_row_by_id = {sequence_id: row for row, sequence_id in enumerate(sampled)}
        # Also of a step that draws nothing: its page is written again once it has been waited for.
        return DeviceLaunch(arriving=self._drawn.fetch(len(sampled)), on_progress=self._report)

    def replay(self, num_rows: int, kind: DrawKind) -> None:
        """Once more the decode that was sent last, whatever it was, padded as one of so many rows; for measurements."""
        self._replay(self._sizes[bisect_left(self._sizes, num_rows)], kind)

    def _replay(self, size: int, kind: DrawKind) -> None:
        self._graphs.replay((_MODEL, size))
        self._graphs.replay((kind, size))

    def logits(self, plan: StepPlan) -> torch.Tensor:
        size = self._graph_size(plan)
        if size is None:
            return super().logits(plan)
        with torch.inference_mode():
            self._send(plan, [], size)
            self._graphs.replay((_MODEL, size))
            return self._logits[: len(plan.sequences)]

    def _graph_size(self, plan: StepPlan) -> int | None:
        """Rows of the recorded decode that computes the plan; None if it is not a decode, or was not recorded."""
        is_decode = all(len(planned.token_ids) == 1 and planned.is_sampled for planned in plan.sequences)
        if not is_decode or not 0 < len(plan.sequences) <= self._limits.max_running:
            return None
        size = self._sizes[bisect_left(self._sizes, len(plan.sequences))]
        return size if (_MODEL, size) in self._graphs else None

    def _send(self, plan: StepPlan, draws: Sequence[Draw], size: int | None) -> _Inputs:
        """Puts the plan on the device, padded to `size` rows if there is one."""
        rows = pack_rows(plan.sequences)
        num_rows = sum(each.num_rows for each in rows)
        padded = num_rows if size is None else size
        num_drawn = sum(planned.is_sampled for planned in plan.sequences) if size is None else size
        token_ids, sources, positions = (np.zeros(padded, dtype=np.int32) for _ in range(3))
        sources[:] = -1
        chosen = np.arange(num_drawn, dtype=np.int32)
        drawn = 0
        for planned, each in zip(plan.sequences, rows, strict=True):
            own = slice(each.first_row, each.end_row)
            token_ids[own] = planned.token_ids
            positions[own] = np.arange(planned.start, planned.context_length)
            if planned.token_ids[-1] == UNKNOWN_TOKEN:
                token_ids[each.end_row - 1] = 0
                sources[each.end_row - 1] = self._drawn_row_by_id[planned.sequence_id]
            if planned.is_sampled:
                chosen[drawn] = each.end_row - 1
                drawn += 1
        arrays = self._triton.arrange(rows, padded - num_rows)
        sections = [token_ids, sources, positions, chosen, *draw_sections(draws, num_drawn), *arrays.sections]
        return self._read(self._pages.send(sections), arrays.longest_context)

    def _read(self, sections: Sequence[torch.Tensor], longest_context: int) -> _Inputs:
        """What `_send` wrote."""
        token_ids, sources, positions, chosen, numbers, top_k = sections[: -len(SECTION_NAMES)]
        return _Inputs(
            token_ids=token_ids,
            sources=sources,
            positions=positions,
            chosen=chosen,
            draws=read_sections(numbers, top_k),
            attend=self._triton.step_over(sections[-len(SECTION_NAMES) :], longest_context),
        )

    def _recorded_inputs(self, size: int) -> _Inputs:
        """Where `_send` puts a decode of so many rows, whatever it holds."""
        nothing: list[SequenceRows] = []
        arrays = self._triton.arrange(nothing, size)
        sections: list[Integers] = [np.zeros(size, dtype=np.int32) for _ in range(4)]
        sections += [*draw_sections([], size), *arrays.sections]
        sections[1] -= 1
        self._pages.send(sections)  # padding, so that recording computes something defined
        places = self._pages.places([section.size for section in sections])
        return self._read(places, self._limits.blocks_per_sequence * self._triton.shape.block_size)

    def _decode(self, inputs: _Inputs, size: int) -> None:
        self._logits[:size].copy_(self._model.logits(self._forward_rows(inputs)))

    def _forward_rows(self, inputs: _Inputs) -> torch.Tensor:
        drawn = self._drawn.on_device.index_select(0, inputs.sources.clamp(min=0))
        token_ids = torch.where(inputs.sources >= 0, drawn, inputs.token_ids)
        return self._model.forward(token_ids.long(), inputs.positions.long(), inputs.attend, inputs.chosen.long())

    def _draw(self, logits: torch.Tensor, inputs: _Inputs, kind: DrawKind) -> None:
        self._drawn.on_device[: len(logits)].copy_(draw_rows(logits, inputs.draws, kind))
