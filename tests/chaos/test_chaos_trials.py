"""Twelve trials of the chaos harness with the simulated engine: one of nearly every fault, checked exactly."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.campaign import Campaign, run_campaign, temporary_setup
from tests.chaos.engines import LEASE_S, start_simulated
from tests.chaos.plan import Scale
from tests.chaos.report import summary

NUM_TRIALS = 12
SCALE = Scale(lease_s=LEASE_S, num_readers=(10, 14), num_tokens=(6, 80))
"""Less than `make chaos` asks for, so that all of it takes about a minute."""


@pytest.mark.timeout(240)
async def test_random_faults_lose_nothing_and_change_no_stream(tmp_path: Path) -> None:
    campaign = Campaign(seed=20, numbers=range(1, NUM_TRIALS + 1), engine="sim", directory=tmp_path)
    async with temporary_setup(start_simulated) as setup:
        tally = await run_campaign(campaign, replace(setup, scale=SCALE), print)
    print(summary(tally))
    assert tally.num_trials == NUM_TRIALS
    assert tally.is_good, tally.failed or tally.swept
