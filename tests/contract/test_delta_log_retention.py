"""What is left of a log after the end."""

from service_kit.delta import Cursor
from service_kit.ids import GatewayId, GenerationId, new_generation_id
from state_store.delta_log.port import AppendStatus
from tests.support.delta_logs import SUCCEEDED, LogUnderTest, delta_after


async def unsealed(under_test: LogUnderTest, limit: int = 1000) -> list[GenerationId]:
    """A whole round."""
    found, place = await under_test.log.unsealed_page(0, limit=limit)
    while place:
        more, place = await under_test.log.unsealed_page(place, limit=limit)
        found += more
    return sorted(set(found))


async def test_a_dropped_log_is_absent_and_takes_no_late_append(
    log_under_test: LogUnderTest, generation_id: GenerationId
) -> None:
    gateway = GatewayId("gw")
    await log_under_test.log.attach_many(gateway, [(generation_id, 0)])
    await log_under_test.open(generation_id, 1)
    first = delta_after(Cursor(), 1, 2, 3)
    await log_under_test.append(generation_id, 1, first)
    await log_under_test.seal(generation_id, 1, SUCCEEDED)
    other = new_generation_id()
    await log_under_test.open(other, 1)
    await log_under_test.log.drop_many([generation_id])
    assert not (await log_under_test.read(generation_id)).is_present
    assert await log_under_test.log.last_watched_many([generation_id]) == [None]
    assert await log_under_test.status(generation_id, 1, delta_after(first.end, 4)) is AppendStatus.ABSENT
    assert (await log_under_test.read(other)).is_present
    await log_under_test.log.drop_many([generation_id])


async def test_a_round_over_the_unsealed_logs_names_each_and_no_sealed_one(log_under_test: LogUnderTest) -> None:
    assert await unsealed(log_under_test) == []
    ids = [new_generation_id() for _ in range(60)]
    for each in ids:
        await log_under_test.open(each, 1)
        await log_under_test.append(each, 1, delta_after(Cursor(), 1))
        await log_under_test.log.attach_many(GatewayId("gw"), [(each, 0)])
    for each in ids[:20]:
        await log_under_test.seal(each, 1, SUCCEEDED)
    for each in ids[20:25]:
        await log_under_test.seal(each, 1)  # lost attempts: they go on
    assert await unsealed(log_under_test, limit=7) == ids[20:]


async def test_whoever_watches_what_has_no_log_is_named_until_its_end_is_told(log_under_test: LogUnderTest) -> None:
    waiting, ended, sealed = new_generation_id(), new_generation_id(), new_generation_id()
    await log_under_test.open(sealed, 1)
    await log_under_test.seal(sealed, 1, SUCCEEDED)
    await log_under_test.log.attach_many(GatewayId("gw"), [(waiting, 0), (ended, 0), (sealed, 0)])
    await log_under_test.log.unwatch_many(GatewayId("gw"), [ended])
    assert await unsealed(log_under_test) == sorted([waiting, ended])
    await log_under_test.seal(ended, 0, SUCCEEDED)
    assert await unsealed(log_under_test) == [waiting]
