"""What tests of the quotas do again and again."""

from collections.abc import Awaitable
from datetime import timedelta

import pytest

from service_kit.ids import KeyId
from state_store.quota.errors import LimitReachedError
from state_store.quota.port import QuotaCharge, QuotaKind, QuotaScope, QuotaSubject
from tests.support.quotas import (
    Quota,
    subject_of,
)

SECOND = timedelta(seconds=1)
OTHER_KEY = KeyId("key-b")
EVERY_LIMIT = [(scope, kind) for scope in QuotaScope for kind in QuotaKind]
FREE = subject_of()


async def refusal(call: Awaitable[object]) -> LimitReachedError:
    with pytest.raises(LimitReachedError) as caught:
        await call
    return caught.value


async def admitted(quota: Quota, charge: QuotaCharge, subject: QuotaSubject) -> bool:
    try:
        await quota.reserve(charge, subject)
    except LimitReachedError:
        return False
    return True
