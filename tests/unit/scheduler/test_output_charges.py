import pytest

from scheduler.output_charges import OutputCharges
from scheduler.queue.errors import QueueUnavailableError
from scheduler.queue.port import OutputCharge
from scheduler.tenant_weights import TenantWeights
from state_store.model import ModelKey
from tests.support.scheduler_rig import MODEL_KEY, ManualClock
from tests.unit.scheduler.test_tenant_weights import Weights

OTHER_KEY = ModelKey(revision="other", precision="fp32")


class Charged:
    """The part of a queue that is charged."""

    def __init__(self):
        self.charges = []
        self.is_reachable = True

    async def charge_many(self, charges):
        if not self.is_reachable:
            raise QueueUnavailableError("away")
        self.charges.append(charges)


@pytest.fixture
def queue():
    return Charged()


@pytest.fixture
def charges(queue):
    return OutputCharges(queue=queue, weights=TenantWeights(store=Weights(a=3.0), clock=ManualClock()))


async def test_tokens_gather_by_model_and_tenant_and_go_once(queue, charges):
    charges.note(MODEL_KEY, "a", 2)
    charges.note(MODEL_KEY, "b", 5)
    charges.note(MODEL_KEY, "a", 3)
    charges.note(OTHER_KEY, "a", 1)
    await charges.flush_once()
    await charges.flush_once()
    assert queue.charges == [
        [
            OutputCharge(model_key=MODEL_KEY, tenant_id="a", weight=3.0, tokens=5),
            OutputCharge(model_key=MODEL_KEY, tenant_id="b", weight=1.0, tokens=5),
            OutputCharge(model_key=OTHER_KEY, tenant_id="a", weight=3.0, tokens=1),
        ]
    ]


async def test_what_may_have_been_charged_is_not_charged_again(queue, charges):
    charges.note(MODEL_KEY, "a", 2)
    queue.is_reachable = False
    await charges.flush_once()
    queue.is_reachable = True
    charges.note(MODEL_KEY, "a", 1)
    await charges.flush_once()
    assert queue.charges == [[OutputCharge(model_key=MODEL_KEY, tenant_id="a", weight=3.0, tokens=1)]]
