"""What the trials run on: the simulated engine, whose every token can be recomputed, or a real model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sluice.commands.models import DEFAULT_MODEL, DEFAULT_SIMULATED_MODEL, require_model
from sluice.home import Home, find_home
from tests.chaos.oracle import Predictions
from tests.chaos.plan import Scale
from tests.chaos.real import real_predictions, run_undisturbed
from tests.chaos.simulated import simulated_predictions
from tests.chaos.stack import ChaosSettings, ChaosStack
from tests.chaos.trial import Patience

LEASE_S = 3.0
"""Shorter than the default of 5 s, so that a trial is; beats and reconnect window are what they always are."""
_TOKENS_PER_S = 40.0
_PREFILL_TOKENS_PER_S = 1500.0
_PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "Water boils at a temperature of",
    "1, 2, 3, 4, 5, 6,",
    "Q: What is photosynthesis?\nA:",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A stack with what its trials need."""

    stack: ChaosStack
    scale: Scale
    predictions: Predictions
    patience: Patience


def _environment(engine_settings: Mapping[str, object]) -> dict[str, str]:
    return {
        "SLUICE_LEASE_S": f"{LEASE_S:g}",
        "SLUICE_DRAIN_S": "1",
        "SLUICE_ENGINE_SETTINGS": json.dumps(engine_settings),
    }


async def start_simulated(root: Path) -> Setup:
    """A started stack with the simulated engine in token mode `nonce`."""
    home = Home(root=root)
    home.create()
    require_model(home, DEFAULT_SIMULATED_MODEL, engine="simulated")
    settings = {
        "tokens_per_s": _TOKENS_PER_S,
        "prefill_tokens_per_s": _PREFILL_TOKENS_PER_S,
        "max_running": 12,
        "token_mode": "nonce",
    }
    stack = ChaosStack(
        ChaosSettings(
            home=home,
            models_directory=home.models,
            model=DEFAULT_SIMULATED_MODEL,
            engine="simulated",
            environment=_environment(settings),
        )
    )
    await _started(stack)
    return Setup(stack=stack, scale=Scale(lease_s=LEASE_S), predictions=simulated_predictions(), patience=Patience())


async def start_real(root: Path) -> Setup:
    """A started stack with the small real model, and what it says undisturbed. The model lies in the local cache; raises
    UserError when it does not."""
    models = find_home().models
    require_model(find_home(), DEFAULT_MODEL, engine="native")
    settings = {"threads": 1, "max_running": 12, "num_blocks": 512}
    stack = ChaosStack(
        ChaosSettings(
            home=Home(root=root),
            models_directory=models,
            model=DEFAULT_MODEL,
            engine="native",
            environment=_environment(settings),
        )
    )
    await _started(stack)
    scale = Scale(
        lease_s=LEASE_S, num_readers=(5, 9), num_tokens=(12, 72), has_stops=False, prompts=_PROMPTS, seeds=(7,)
    )
    try:
        async with stack.client(0) as client:
            references = await run_undisturbed(client, DEFAULT_MODEL, scale)
    except BaseException:
        await stack.stop()
        raise
    patience = Patience(readers_s=120.0, rows_s=30.0, serving_s=180.0)
    return Setup(stack=stack, scale=scale, predictions=real_predictions(references), patience=patience)


async def _started(stack: ChaosStack) -> None:
    try:
        await stack.start()
    except BaseException:
        await stack.stop()
        raise
