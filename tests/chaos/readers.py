"""Clients of one trial: each behaves as its plan says and writes down exactly what it was told."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise

from service_kit.delta import Cursor
from service_kit.errors import SluiceError
from sluice.client import SluiceClient
from sluice.client_events import Accepted, Event, Finished, Output, Sampling
from tests.chaos.history import Ending, Failure, Piece, Visit
from tests.chaos.plan import Manner, ReaderPlan

_GRACE = timedelta(minutes=2)
"""Longer than any fault: what ends a generation here is its output or a cancel."""


@dataclass(slots=True)
class _Notes:
    """One visit while it goes on."""

    request_id: str
    reader: str
    start: Cursor = Cursor()
    began_s: float = field(default_factory=time.monotonic)
    accepted_ids: list[str] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    ending: Ending | None = None
    failure: Failure | None = None
    ended_s: float | None = None

    @property
    def cursor(self) -> Cursor:
        return self.pieces[-1].end if self.pieces else self.start

    def take(self, event: Event) -> None:
        if isinstance(event, Accepted):
            self.accepted_ids.append(event.generation_id)
        elif isinstance(event, Output) and event.token_ids:
            piece = Piece(token_ids=event.token_ids, text=event.text, end=event.cursor, at_s=time.monotonic())
            self.pieces.append(piece)
        elif isinstance(event, Finished):
            self.ended_s = time.monotonic()
            self.ending = Ending(
                finish_reason=event.finish_reason.value,
                prompt_tokens=event.prompt_tokens,
                output_tokens=event.output_tokens,
            )

    def visit(self) -> Visit:
        times = [piece.at_s for piece in self.pieces]
        begin = [self.began_s] if self.start.sequence_number else []
        end = [self.ended_s] if self.ended_s is not None else []
        pauses = [later - earlier for earlier, later in pairwise([*begin, *times, *end])]
        return Visit(
            request_id=self.request_id,
            reader=self.reader,
            start=self.start,
            accepted_ids=tuple(self.accepted_ids),
            pieces=tuple(self.pieces),
            ending=self.ending,
            failure=self.failure,
            longest_pause_s=max(pauses, default=0.0),
            first_token_s=times[0] - self.began_s if times and not begin else None,
        )


class Reader:
    """One client of one request."""

    def __init__(self, plan: ReaderPlan, number: int, model: str, clients: Callable[[], SluiceClient]) -> None:
        """`number` tells the readers of one request apart."""
        self.name = f"{plan.wish.request_id}/{number}"
        self._plan = plan
        self._model = model
        self._clients = clients
        self._notes: list[_Notes] = []

    @property
    def request_id(self) -> str:
        return self._plan.wish.request_id

    @property
    def visits(self) -> list[Visit]:
        return [notes.visit() for notes in self._notes]

    @property
    def is_over(self) -> bool:
        return bool(self._notes) and (self._notes[-1].ending is not None or self._notes[-1].failure is not None)

    async def run(self) -> None:
        """Until the end of the stream, or until it is told an error; cancelled, it leaves its notes as they are."""
        plan = self._plan
        await asyncio.sleep(plan.starts_after_s)
        match plan.manner:
            case Manner.STAY | Manner.REPEAT:
                await self._read(Cursor(), None)
            case Manner.RETURN:
                cursor = Cursor()
                for count in plan.leaves_after:
                    cursor = await self._read(cursor, count)
                    if self.is_over:
                        return
                    await asyncio.sleep(plan.is_away_s)
                await self._read(cursor, None)
            case Manner.CANCEL:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._read(Cursor(), None, on_token=self._cancel_task(tasks)))
            case Manner.CREATE:
                await self._create()

    def _cancel_task(self, tasks: asyncio.TaskGroup) -> Callable[[int], None]:
        """Asks for the cancel once, at the token of the plan; the stream is read on to its end."""
        asked: list[bool] = []

        def on_token(count: int) -> None:
            if not asked and count >= self._plan.cancels_after:
                asked.append(True)
                tasks.create_task(self._cancel())

        return on_token

    async def _cancel(self) -> None:
        notes = _Notes(request_id=self.request_id, reader=f"{self.name}/cancel")
        with _failure_noted(notes):
            await self._clients().cancel(request_id=self._plan.wish.request_id)
        if notes.failure is not None:
            self._notes.insert(0, notes)

    async def _create(self) -> None:
        plan = self._plan
        notes = _Notes(request_id=self.request_id, reader=self.name)
        self._notes.append(notes)
        with _failure_noted(notes):
            accepted = await self._clients().create(
                self._model,
                plan.wish.text,
                sampling=self._sampling(),
                request_id=plan.wish.request_id,
                priority_class=plan.priority_class,
                grace=_GRACE,
            )
            notes.take(accepted)
            await asyncio.sleep(plan.is_away_s)
            events = self._clients().stream(generation_id=accepted.generation_id)
            await self._follow(events, notes, None, lambda _: None)

    async def _read(
        self, cursor: Cursor, leaves_after: int | None, on_token: Callable[[int], None] = lambda _: None
    ) -> Cursor:
        """One visit; the first names what is wanted, later ones may name the request alone. Returns where it stands."""
        plan, client = self._plan, self._clients()
        notes = _Notes(request_id=self.request_id, reader=self.name, start=cursor)
        self._notes.append(notes)
        if cursor.sequence_number % 2:
            events = client.stream(request_id=plan.wish.request_id, cursor=cursor)
        else:
            events = client.generate(
                self._model,
                plan.wish.text,
                sampling=self._sampling(),
                request_id=plan.wish.request_id,
                cursor=cursor,
                priority_class=plan.priority_class,
                grace=_GRACE,
            )
        with _failure_noted(notes):
            await self._follow(events, notes, leaves_after, on_token)
        return notes.cursor

    async def _follow(
        self,
        events: AsyncGenerator[Event, None],
        notes: _Notes,
        leaves_after: int | None,
        on_token: Callable[[int], None],
    ) -> None:
        async with contextlib.aclosing(events):
            async for event in events:
                notes.take(event)
                if notes.accepted_ids:
                    on_token(notes.cursor.sequence_number)
                if leaves_after is not None and notes.cursor.sequence_number >= leaves_after:
                    return

    def _sampling(self) -> Sampling:
        wish = self._plan.wish
        return Sampling(
            temperature=self._plan.temperature,
            seed=self._plan.seed,
            max_output_tokens=wish.max_output_tokens,
            stop=(wish.stop,) if wish.stop is not None else (),
            ignore_eos=True,
        )


class _failure_noted(contextlib.AbstractContextManager[None]):  # noqa: N801 - reads as a clause
    """Writes down the error that a client was told."""

    def __init__(self, notes: _Notes) -> None:
        self._notes = notes

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, SluiceError):
            return False
        self._notes.ended_s = time.monotonic()
        self._notes.failure = Failure(kind=type(error).__name__, reason=error.reason, message=error.message)
        return True
