"""One client's place in an output: what to forward, what to read next, when it is over. Pure.

Four sources speak about one generation and may each be late: pushes, views of the log, the durable record, and the
stored output. The reader forwards only what continues its cursor, by number and by chain; everything else is a hint that
tells it where to look. A final record outranks the log.
"""

from collections.abc import Iterable
from enum import StrEnum

from service_kit.delta import ChainMismatchError, Cursor, Delta, rest_after
from state_store.delta_log.port import LogEnd, LogView, Push
from state_store.model import GenerationRecord


class Need(StrEnum):
    """What the reader must see next."""

    NEWS = "NEWS"
    """Nothing is missing: wait for a push."""
    LOG = "LOG"
    """Pushes were missed: read the log behind the cursor."""
    RECORD = "RECORD"
    """There is no log: the row tells whether the generation waits or is over."""
    STORED_OUTPUT = "STORED_OUTPUT"
    """What follows the cursor is no longer, or not yet, in the log."""
    NOTHING = "NOTHING"
    """The end is known and reached."""


class CursorBeyondEndError(Exception):
    """The generation is over and never had the reader's sequence number."""


class OutputMissingError(Exception):
    """Neither log nor store has what follows the cursor."""


class OutputReader:
    """Mutable owner of one reader's cursor. Each `take_…` returns the deltas to forward and sets `need`.

    All of them raise ChainMismatchError when another output stands at the reader's position, CursorBeyondEndError, or
    OutputMissingError.
    """

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.end: LogEnd | None = None
        self.need = Need.LOG
        # A reader without output has nothing to contradict; any other cursor is the client's word until it was compared.
        self._is_verified = cursor.sequence_number == 0
        self._is_log_exhausted = False
        self._is_record_read = False

    def take_push(self, push: Push) -> list[Delta]:
        """A push that leaves a gap, or announces more than it carries, makes the reader read the log."""
        forward: list[Delta] = []
        if push.delta is not None:
            if push.delta.first > self.cursor.sequence_number + 1:
                self.need = Need.LOG
                self._note_end(push.terminal)
                return forward
            forward = self._advance([push.delta])
        self._compare(push.end)
        self._note_end(push.terminal)
        if push.end.sequence_number > self.cursor.sequence_number:
            self.need = Need.LOG
        else:
            self._settle()
        return forward

    def take_view(self, view: LogView) -> list[Delta]:
        """A view of the log, asked for at this cursor or an earlier one."""
        if not view.is_present:
            self._is_log_exhausted = True
            self._settle()
            if self.end is None:
                self.need = Need.NEWS if self._is_record_read else Need.RECORD
            return []
        self._note_end(view.terminal)
        self._compare(view.base)
        if view.base.sequence_number > self.cursor.sequence_number:
            self.need = Need.STORED_OUTPUT
            return []
        forward = self._advance(view.deltas)
        self._compare(view.end)
        self._is_log_exhausted = True
        self._settle()
        return forward

    def take_record(self, record: GenerationRecord) -> list[Delta]:
        """The durable row; only a final one changes anything."""
        self._is_record_read = True
        if record.state.is_terminal:
            self._note_end(LogEnd.of(record))
            self._is_log_exhausted = True
        self._settle()
        return []

    def take_stored_output(self, output: Delta | None) -> list[Delta]:
        """The output as stored. For a final generation it is complete; for a live one it reaches at least the log's base,
        so the log comes next."""
        before = self.cursor
        forward = self._advance([output] if output is not None else [])
        if self.end is None:
            if self.cursor == before:
                raise OutputMissingError(f"nothing is stored behind sequence number {before.sequence_number}")
            self.need = Need.LOG
            return forward
        self._check_reach(self.end)
        if not self._is_at_end(self.end):
            raise OutputMissingError(f"the stored output ends at sequence number {self.cursor.sequence_number}")
        self.need = Need.NOTHING
        return forward

    def mark_behind(self) -> None:
        """Pushes were dropped: the log has them."""
        if self.need is Need.NEWS:
            self.need = Need.LOG

    def _advance(self, deltas: Iterable[Delta]) -> list[Delta]:
        forward: list[Delta] = []
        for delta in deltas:
            if delta.first > self.cursor.sequence_number + 1:
                raise OutputMissingError(f"a gap follows sequence number {self.cursor.sequence_number}")
            rest = rest_after(self.cursor, delta)
            # rest_after compared chains unless the delta ends before the cursor.
            if delta.last >= self.cursor.sequence_number:
                self._is_verified = True
            if rest is not None:
                self.cursor = rest.end
                forward.append(rest)
        return forward

    def _compare(self, known: Cursor) -> None:
        """A position whose chain is known, exactly at the cursor, proves or refutes it."""
        if known.sequence_number != self.cursor.sequence_number or known.sequence_number == 0:
            return
        if known.chain != self.cursor.chain:
            raise ChainMismatchError(f"another output stands at sequence number {known.sequence_number}")
        self._is_verified = True

    def _note_end(self, end: LogEnd | None) -> None:
        if end is not None:
            self.end = end

    def _settle(self) -> None:
        """Decides what is missing, now that the log (or a push) added nothing more."""
        if self.end is None:
            self.need = Need.NEWS
            return
        self._check_reach(self.end)
        if self._is_at_end(self.end):
            self.need = Need.NOTHING
        elif self._is_log_exhausted:
            self.need = Need.STORED_OUTPUT
        else:
            self.need = Need.LOG

    def _check_reach(self, end: LogEnd) -> None:
        if self.cursor.sequence_number > end.output_tokens:
            raise CursorBeyondEndError(f"the output ends at sequence number {end.output_tokens}")

    def _is_at_end(self, end: LogEnd) -> bool:
        return self._is_verified and self.cursor.sequence_number == end.output_tokens
