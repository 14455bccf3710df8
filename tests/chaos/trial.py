"""Runs one trial on a stack that serves, and hands its history to the oracle."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from sluice.client import SluiceClient
from tests.chaos.database import Rows, connect, is_all_over, read_rows
from tests.chaos.faults import NO_TAKEOVER, Faults
from tests.chaos.history import Failure, History, Visit
from tests.chaos.oracle import Finding, Predictions, judge
from tests.chaos.plan import TrialPlan
from tests.chaos.readers import Reader
from tests.chaos.stack import ChaosStack
from tests.chaos.waiting import until

_NUM_CLIENTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """`readers`: from the end of the fault to the end of every stream. `rows`: then until every row is final.
    `serving`: until every process serves again."""

    readers_s: float = 45.0
    rows_s: float = 15.0
    serving_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """What a trial found, and what a report of it needs."""

    plan: TrialPlan
    history: History
    rows: Rows
    findings: list[Finding]
    notes: list[tuple[float, str]]
    took_s: float
    began_s: float
    deaths: int = 0

    @property
    def stalls(self) -> list[str]:
        """Takeovers that did not come while the old owner was stopped: nothing is wrong then, and nothing goes on."""
        return [text for _, text in self.notes if text.startswith(NO_TAKEOVER)]

    @property
    def longest_pause_s(self) -> float:
        return max((visit.longest_pause_s for visit in self.history.visits), default=0.0)

    @property
    def accepted(self) -> set[str]:
        return {generation_id for visit in self.history.visits for generation_id in visit.accepted_ids}


@dataclass(slots=True)
class _Diary:
    began_s: float = field(default_factory=time.monotonic)
    entries: list[tuple[float, str]] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.entries.append((round(time.monotonic() - self.began_s, 3), text))


async def run_trial(
    stack: ChaosStack, plan: TrialPlan, predictions: Predictions, patience: Patience | None = None
) -> TrialResult:
    """The stack serves before and after. Raises TimeoutError when it does not come back."""
    patience = patience or Patience()
    diary, deaths = _Diary(), len(stack.deaths)
    clients = [stack.client(number) for number in range(_NUM_CLIENTS)]
    readers = _make_readers(plan, stack.settings.model, clients)
    tasks = [asyncio.create_task(reader.run()) for reader in readers]
    try:
        await Faults(stack, plan.fault, diary.note).run()
        await stack.heal()
        await asyncio.wait(tasks, timeout=patience.readers_s)
        diary.note(f"{sum(not task.done() for task in tasks)} readers have not ended")
    finally:
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for client in clients:
            await client.close()
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if errors:
        raise ExceptionGroup("a reader broke down", errors)
    await stack.until_serving(patience.serving_s)
    rows = await _final_rows(stack, f"chaos-{plan.seed}-{plan.number}-", patience.rows_s)
    history = _history(plan, rows, [visit for reader in readers for visit in _visits(reader)])
    return TrialResult(
        plan=plan,
        history=history,
        rows=rows,
        findings=judge(history, predictions),
        notes=diary.entries,
        took_s=time.monotonic() - diary.began_s,
        began_s=diary.began_s,
        deaths=len(stack.deaths) - deaths,
    )


def _make_readers(plan: TrialPlan, model: str, clients: list[SluiceClient]) -> list[Reader]:
    turns = count()

    def next_client() -> SluiceClient:
        return clients[next(turns) % len(clients)]

    return [
        Reader(reader_plan, number, model, next_client)
        for reader_plan in plan.readers
        for number in range(reader_plan.num_readers)
    ]


def _visits(reader: Reader) -> Iterator[Visit]:
    """With a failure of its own for a stream that never ended."""
    yield from reader.visits
    if not reader.is_over:
        failure = Failure(kind="NoEnd", reason="", message="the stream did not end in time")
        yield Visit(request_id=reader.request_id, reader=reader.name, failure=failure)


async def _final_rows(stack: ChaosStack, prefix: str, timeout_s: float) -> Rows:
    async with connect(stack.dsn) as connection:
        await until(lambda: is_all_over(connection, prefix), timeout_s)
        return await read_rows(connection, prefix)


def _history(plan: TrialPlan, rows: Rows, visits: list[Visit]) -> History:
    return History(
        wishes=tuple(reader.wish for reader in plan.readers),
        visits=tuple(visits),
        generations=rows.generations,
        attempts=rows.attempts,
        chunks=rows.chunks,
        ledger=rows.ledger,
        grants=rows.grants,
        changed_after_end=rows.changed_after_end,
        can_lose_output=plan.fault.can_lose_output,
    )
