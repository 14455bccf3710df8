"""Trials of the chaos harness with the simulated engine: one of most faults, and one of each of the stores' own,
checked exactly."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.campaign import Campaign, run_campaign, temporary_setup
from tests.chaos.engines import LEASE_S, Setup, start_simulated
from tests.chaos.plan import STORES_ONLY, Scale
from tests.chaos.report import summary

NUM_TRIALS = 8
SCALE = Scale(lease_s=LEASE_S, num_readers=(10, 14), num_tokens=(6, 80))
"""Less than `make chaos` asks for, so that all of it takes about a minute."""


@pytest.fixture(scope="module")
async def setup() -> AsyncIterator[Setup]:
    async with temporary_setup(start_simulated) as setup:
        yield replace(setup, scale=SCALE)


@pytest.mark.timeout(240)
async def test_random_faults_lose_nothing_and_change_no_stream(setup: Setup, tmp_path: Path) -> None:
    campaign = Campaign(seed=20, numbers=range(1, NUM_TRIALS + 1), engine="sim", directory=tmp_path)
    tally = await run_campaign(campaign, setup, print)
    print(summary(tally))
    assert tally.num_trials == NUM_TRIALS
    assert tally.is_good, tally.failed or tally.swept


@pytest.mark.timeout(240)
async def test_faults_of_the_stores_lose_nothing_and_change_no_stream(setup: Setup, tmp_path: Path) -> None:
    numbers = range(1, len(STORES_ONLY) + 1)
    campaign = Campaign(seed=21, numbers=numbers, engine="sim", directory=tmp_path, deck=STORES_ONLY)
    tally = await run_campaign(campaign, setup, print)
    print(summary(tally))
    assert tally.is_good, tally.failed or tally.swept
