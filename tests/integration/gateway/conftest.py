from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.gateway import GatewayRig, running_gateway


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[GatewayRig]:
    """A running gateway with fast limits over memory twins."""
    async with running_gateway(tmp_path) as rig:
        yield rig
