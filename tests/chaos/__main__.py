"""`python -m tests.chaos`: many trials, one verdict. Exit code 0 when every check holds, 1 when one does not, 2 when the
harness itself failed."""

import argparse
import asyncio
import sys
import traceback
from pathlib import Path

from tests.chaos.campaign import Campaign, run_campaign, temporary_setup
from tests.chaos.engines import start_real, start_simulated
from tests.chaos.plan import DECKS, FaultKind
from tests.chaos.report import summary, write_result

_STARTS = {"sim": start_simulated, "real": start_real}


def main(arguments: list[str] | None = None) -> int:
    parsed = _parser().parse_args(arguments)
    numbers = [parsed.trial] if parsed.trial else list(range(parsed.start, parsed.start + parsed.trials))
    campaign = Campaign(
        seed=parsed.seed,
        numbers=numbers,
        engine=parsed.engine,
        directory=parsed.out,
        deck=tuple(parsed.only) if parsed.only else DECKS[parsed.faults],
        faults=parsed.faults,
        stops_at_first=parsed.stop_at_first,
        keeps_pause_s=parsed.keep_pause,
    )
    try:
        return asyncio.run(_run(campaign))
    except Exception:  # noqa: BLE001 - told apart from a finding by the exit code
        traceback.print_exc()
        return 2


async def _run(campaign: Campaign) -> int:
    async with temporary_setup(_STARTS[campaign.engine]) as setup:
        tally = await run_campaign(campaign, setup, lambda line: print(line, flush=True))
        for death in setup.stack.deaths:
            print(f"{death.process} {death.text}")
    print(summary(tally))
    print(f"{'written':<20}{write_result(campaign.directory, tally)}")
    return 0 if tally.is_good else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Random faults, exact checks.")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=sorted(_STARTS), default="sim")
    parser.add_argument("--trial", type=int, help="run this one alone")
    parser.add_argument("--start", type=int, default=1, help="number of the first trial")
    parser.add_argument("--faults", choices=sorted(DECKS), default="all")
    parser.add_argument("--only", type=lambda name: FaultKind(name.upper()), nargs="+", help="kinds of faults")
    parser.add_argument("--stop-at-first", action="store_true", help="end after the first trial that fails")
    parser.add_argument("--keep-pause", type=float, help="keep the logs of trials with a pause longer than this, s")
    parser.add_argument("--out", type=Path, default=Path("build/chaos"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
