"""A run of many trials on one stack."""

import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.database import connect, sweep
from tests.chaos.engines import LEASE_S, Setup
from tests.chaos.oracle import failures
from tests.chaos.plan import DECK, FaultKind, draw_trial
from tests.chaos.report import Tally, write_remains, write_result
from tests.chaos.trial import TrialResult, run_trial

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """Which trials. `numbers` count from 1; `directory` takes the result and what failed trials leave."""

    seed: int
    numbers: Sequence[int]
    engine: str
    directory: Path
    deck: tuple[FaultKind, ...] = DECK
    faults: str = "all"
    """Name of the deck."""
    stops_at_first: bool = False
    keeps_pause_s: float | None = None
    """Trials with a longer pause leave their remains too."""


def _make_root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="sluice-chaos-"))
    root.chmod(0o711)
    return root


@asynccontextmanager
async def temporary_setup(start: Callable[[Path], Awaitable[Setup]]) -> AsyncIterator[Setup]:
    """A stack in a directory of its own, which the unprivileged user of Postgres can reach; removed at the end."""
    root = _make_root()
    try:
        setup = await start(root)
        try:
            yield setup
        finally:
            await setup.stack.stop()
    finally:
        shutil.rmtree(root, ignore_errors=True)


async def run_campaign(campaign: Campaign, setup: Setup, say: Say) -> Tally:
    """Runs the trials one after another; writes the result after each, so that a run that is stopped leaves one."""
    tally = Tally(seed=campaign.seed, engine=campaign.engine, lease_s=LEASE_S)
    for number in campaign.numbers:
        plan = draw_trial(campaign.seed, number, setup.scale, campaign.deck)
        first_line = len(setup.stack.lines)
        result = await run_trial(setup.stack, plan, setup.predictions, setup.patience)
        tally.add(result)
        say(_one_line(result))
        bad = failures(result.findings)
        remains = campaign.directory / f"trial-{campaign.seed}-{number}"
        if bad or (campaign.keeps_pause_s is not None and result.longest_pause_s > campaign.keeps_pause_s):
            write_remains(remains, result, setup.stack.lines)
        for stall in result.stalls:
            say(f"    {stall}")
        if bad:
            say(_complaint(campaign, result, remains))
        del setup.stack.lines[:first_line]
        write_result(campaign.directory, tally)
        if bad and campaign.stops_at_first:
            break
    async with connect(setup.stack.dsn) as connection:
        tally.swept = await sweep(connection)
    return tally


def _one_line(result: TrialResult) -> str:
    found = failures(result.findings)
    verdict = f"{len(found)} FINDINGS" if found else "ok"
    permitted = len(result.findings) - len(found)
    lost = f", data loss permitted {permitted}" if permitted else ""
    return (
        f"trial {result.plan.number:>4}  {result.plan.fault.kind:<15} {len(result.history.generations):>3} generations,"
        f" {len(result.history.attempts):>3} attempts, pause {result.longest_pause_s:4.1f} s, took {result.took_s:4.1f} s: {verdict}{lost}"
    )


def _complaint(campaign: Campaign, result: TrialResult, remains: Path) -> str:
    lines: Iterable[str] = (
        f"    {finding.kind} {finding.request_id}: {finding.text}" for finding in failures(result.findings)[:10]
    )
    number = result.plan.number
    again = f"make chaos SEED={campaign.seed} TRIAL={number} ENGINE={campaign.engine} FAULTS={campaign.faults}"
    return "\n".join([*lines, f"    replay: {again}", f"    remains: {remains}"])
