from collections.abc import AsyncIterator, Iterator

import pytest

from sluice.local.services import Service
from tests.support.stack import RunningStack, running_stack


@pytest.fixture(scope="session")
def shared_stack() -> Iterator[RunningStack]:
    with running_stack(counts={Service.SCHEDULER: 2, Service.GPU_WORKER: 2, Service.GATEWAY: 2}) as stack:
        yield stack


@pytest.fixture
async def stack(shared_stack: RunningStack) -> AsyncIterator[RunningStack]:
    """Two of each service; whole at the start of every test."""
    await shared_stack.heal()
    yield shared_stack
    shared_stack.crash_file.unlink(missing_ok=True)
