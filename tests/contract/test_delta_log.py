"""Rules of the delta log, on the memory twin and on real Valkey."""

import pytest

from service_kit.delta import Cursor, TokenLogprob, join, make_delta
from service_kit.ids import GatewayId, GenerationId, new_generation_id
from state_store.delta_log.codec import pack_delta, unpack_delta
from state_store.delta_log.port import AppendItem, AppendResult, AppendStatus, LogView, OpenItem, OpenResult
from tests.support.delta_logs import FAILED, SUCCEEDED, Follower, LogUnderTest, delta_after

GATEWAY = GatewayId("gw-attached")


async def test_append_never_creates_a_log(log_under_test: LogUnderTest, generation_id: GenerationId) -> None:
    result = await log_under_test.append(generation_id, 1, delta_after(Cursor(), 1))
    assert result == AppendResult(status=AppendStatus.ABSENT, end=Cursor())
    assert await log_under_test.read(generation_id) == LogView(generation_id=generation_id, is_present=False)


async def test_an_opened_log_is_empty_and_begins_at_its_base(
    log_under_test: LogUnderTest, generation_id: GenerationId
) -> None:
    base = delta_after(Cursor(), 8, 9).end
    opened = await log_under_test.open(generation_id, 1, base)
    assert opened == OpenResult(is_opened=True, attempt=1, base=base, end=base, deltas=())
    view = LogView(generation_id=generation_id, is_present=True, attempt=1, is_open=True, base=base, end=base)
    assert await log_under_test.read(generation_id) == view


async def test_what_was_appended_is_read_as_it_was(log_under_test: LogUnderTest, generation_id: GenerationId) -> None:
    await log_under_test.open(generation_id, 1)
    first = make_delta(after=Cursor(), token_ids=[0, 2**31, 5], texts=["", "é\x00", "🜁"])
    second = make_delta(after=first.end, token_ids=[7], texts=["\n"])
    assert await log_under_test.append(generation_id, 1, first) == AppendResult(status=AppendStatus.OK, end=first.end)
    assert await log_under_test.append(generation_id, 1, second) == AppendResult(status=AppendStatus.OK, end=second.end)
    view = await log_under_test.read(generation_id)
    assert (view.deltas, view.end) == ((first, second), second.end)


async def test_log_probabilities_are_pushed_and_read_as_they_were(
    log_under_test: LogUnderTest, generation_id: GenerationId
) -> None:
    follower = await Follower(log_under_test.log, "gw-logprobs").start()
    await log_under_test.open(generation_id, 1)
    await log_under_test.log.attach_many(follower.gateway_id, [(generation_id, 0)])
    logprobs = (TokenLogprob(-0.5, ((3, -0.25), (2**31, -float("inf")))), TokenLogprob(-(2.0**-100)))
    first = make_delta(after=Cursor(), token_ids=[0, 5], texts=["", "é"], logprobs=logprobs)
    second = make_delta(after=first.end, token_ids=[7], texts=["n"])
    for delta in (first, second):
        await log_under_test.append(generation_id, 1, delta)
    assert (await log_under_test.read(generation_id)).deltas == (first, second)
    pushes = [push for batch in await follower.batches() for push in batch]
    assert [push.delta for push in pushes] == [first, second]
    await follower.stop()


def test_entries_of_before_there_were_log_probabilities_are_read_and_still_written() -> None:
    delta = make_delta(after=Cursor(), token_ids=[0, 300], texts=["", "é"])
    old = bytes.fromhex("95019200cd012c92a0a2c3a900cf") + delta.chain.to_bytes(8, "big")
    assert unpack_delta(old) == delta
    assert pack_delta(delta) == old


async def test_a_read_gives_exactly_the_deltas_that_end_behind_the_cursor(
    log_under_test: LogUnderTest, generation_id: GenerationId
) -> None:
    await log_under_test.open(generation_id, 1)
    first = delta_after(Cursor(), 1, 2, 3)
    second = delta_after(first.end, 4, 5)
    for delta in (first, second):
        await log_under_test.append(generation_id, 1, delta)
    by_cursor = {after: (await log_under_test.read(generation_id, after)).deltas for after in (0, 2, 3, 4, 5, 9)}
    assert by_cursor == {0: (first, second), 2: (first, second), 3: (second,), 4: (second,), 5: (), 9: ()}


async def test_open_refuses_equal_and_lower_attempts_and_changes_nothing(
    log_under_test: LogUnderTest, generation_id: GenerationId
) -> None:
    await log_under_test.open(generation_id, 2)
    delta = delta_after(Cursor(), 1)
    await log_under_test.append(generation_id, 2, delta)
    before = await log_under_test.read(generation_id)
    for attempt in (1, 2):
        refused = await log_under_test.open(generation_id, attempt, delta_after(Cursor(), 7, 8, 9).end)
        assert refused == OpenResult(is_opened=False, attempt=2, base=Cursor(), end=delta.end, deltas=(delta,))
    assert await log_under_test.read(generation_id) == before


async def test_open_of_a_higher_attempt_continues_what_is_there(
    log_under_test: LogUnderTest, generation_id: GenerationId
) -> None:
    await log_under_test.open(generation_id, 1)
    first, second = delta_after(Cursor(), 1, 2), delta_after(delta_after(Cursor(), 1, 2).end, 3)
    for delta in (first, second):
        await log_under_test.append(generation_id, 1, delta)
    opened = await log_under_test.open(generation_id, 2, first.end)
    assert opened == OpenResult(is_opened=True, attempt=2, base=Cursor(), end=second.end, deltas=(first, second))


async def test_an_append_before_its_open_is_unopened(log_under_test: LogUnderTest, generation_id: GenerationId) -> None:
    await log_under_test.open(generation_id, 1)
    result = await log_under_test.append(generation_id, 2, delta_after(Cursor(), 1))
    assert result == AppendResult(status=AppendStatus.UNOPENED, end=Cursor())


async def test_a_paused_scheduler_cannot_splice_its_output_into_the_next_attempt(
    log_under_test: LogUnderTest, generation_id: GenerationId
) -> None:
    await log_under_test.open(generation_id, 1)
    shared = delta_after(Cursor(), *range(1, 51))
    await log_under_test.append(generation_id, 1, shared)
    assert (await log_under_test.open(generation_id, 2)).end == shared.end
    old, new = delta_after(shared.end, 151, 152, 153), delta_after(shared.end, 251, 252, 253)
    assert await log_under_test.append(generation_id, 1, old) == AppendResult(status=AppendStatus.STALE, end=shared.end)
    assert await log_under_test.append(generation_id, 2, new) == AppendResult(status=AppendStatus.OK, end=new.end)
    assert await log_under_test.status(generation_id, 1, old) is AppendStatus.STALE
    assert await log_under_test.status(generation_id, 2, delta_after(new.end, 254)) is AppendStatus.OK
    whole = join((await log_under_test.read(generation_id)).deltas)
    assert whole is not None
    assert whole.token_ids == (*range(1, 51), 251, 252, 253, 254)


async def test_what_arrived_before_the_next_open_is_continued_and_not_repeated(
    log_under_test: LogUnderTest, generation_id: GenerationId
) -> None:
    await log_under_test.open(generation_id, 1)
    late = delta_after(Cursor(), 1, 2, 3)
    assert await log_under_test.status(generation_id, 1, late) is AppendStatus.OK
    assert (await log_under_test.open(generation_id, 2)).end == late.end
    assert await log_under_test.status(generation_id, 2, delta_after(Cursor(), 7, 8, 9)) is AppendStatus.STALE
    assert await log_under_test.status(generation_id, 2, late) is AppendStatus.DUP
    assert await log_under_test.status(generation_id, 2, delta_after(late.end, 4)) is AppendStatus.OK


async def test_repeats_are_dup_however_they_are_cut(log_under_test: LogUnderTest, generation_id: GenerationId) -> None:
    await log_under_test.open(generation_id, 1)
    first, second = delta_after(Cursor(), 1, 2), delta_after(delta_after(Cursor(), 1, 2).end, 3, 4)
    for delta in (first, second):
        await log_under_test.append(generation_id, 1, delta)
    joined, middle = join([first, second]), delta_after(delta_after(Cursor(), 1).end, 2, 3)
    assert joined is not None
    for repeat in (first, second, joined, middle):
        expected = AppendResult(status=AppendStatus.DUP, end=second.end)
        assert await log_under_test.append(generation_id, 1, repeat) == expected
    assert (await log_under_test.read(generation_id)).deltas == (first, second)


async def test_a_gap_and_an_overlap_tell_the_end_to_send_from(
    log_under_test: LogUnderTest, generation_id: GenerationId
) -> None:
    await log_under_test.open(generation_id, 1)
    first = delta_after(Cursor(), 1, 2)
    await log_under_test.append(generation_id, 1, first)
    behind = delta_after(delta_after(first.end, 3).end, 4)
    overlapping = delta_after(delta_after(Cursor(), 1).end, 2, 3)
    for delta in (behind, overlapping):
        expected = AppendResult(status=AppendStatus.GAP, end=first.end)
        assert await log_under_test.append(generation_id, 1, delta) == expected
    assert (await log_under_test.read(generation_id)).deltas == (first,)


async def test_a_sender_whose_output_differs_from_the_logs_is_stale(
    log_under_test: LogUnderTest, generation_id: GenerationId
) -> None:
    await log_under_test.open(generation_id, 1)
    first = delta_after(Cursor(), 1, 2)
    await log_under_test.append(generation_id, 1, first)
    other = delta_after(Cursor(), 8, 9)
    assert await log_under_test.status(generation_id, 1, delta_after(other.end, 3)) is AppendStatus.STALE
    assert await log_under_test.status(generation_id, 1, other) is AppendStatus.STALE
    assert (await log_under_test.read(generation_id)).deltas == (first,)


async def test_a_seal_closes_its_attempt_and_the_next_open_goes_on(
    log_under_test: LogUnderTest, generation_id: GenerationId
) -> None:
    await log_under_test.open(generation_id, 1)
    delta = delta_after(Cursor(), 1)
    await log_under_test.append(generation_id, 1, delta)
    sealed = await log_under_test.seal(generation_id, 1)
    expected = LogView(generation_id=generation_id, is_present=True, attempt=1, base=Cursor(), end=delta.end)
    assert sealed == expected
    assert await log_under_test.seal(generation_id, 1) == expected
    assert await log_under_test.status(generation_id, 1, delta_after(delta.end, 2)) is AppendStatus.STALE
    assert not (await log_under_test.open(generation_id, 1)).is_opened
    assert (await log_under_test.open(generation_id, 2)).is_opened
    assert await log_under_test.status(generation_id, 2, delta_after(delta.end, 2)) is AppendStatus.OK


async def test_a_seal_of_a_higher_attempt_fences_all_below(
    log_under_test: LogUnderTest, generation_id: GenerationId
) -> None:
    await log_under_test.open(generation_id, 1)
    await log_under_test.seal(generation_id, 3)
    assert await log_under_test.status(generation_id, 1, delta_after(Cursor(), 1)) is AppendStatus.STALE
    assert [(await log_under_test.open(generation_id, attempt)).is_opened for attempt in (2, 3, 4)] == [
        False,
        False,
        True,
    ]


async def test_a_seal_leaves_a_higher_attempt_open(log_under_test: LogUnderTest, generation_id: GenerationId) -> None:
    await log_under_test.open(generation_id, 2)
    view = await log_under_test.seal(generation_id, 1)
    assert (view.attempt, view.is_open) == (2, True)
    assert await log_under_test.status(generation_id, 2, delta_after(Cursor(), 1)) is AppendStatus.OK


@pytest.mark.parametrize("sealed_attempt", [1, 2, 3])
async def test_a_terminal_seal_closes_the_log_for_good_and_keeps_its_output(
    log_under_test: LogUnderTest, generation_id: GenerationId, sealed_attempt: int
) -> None:
    await log_under_test.open(generation_id, 2)
    delta = delta_after(Cursor(), 1, 2, 3)
    await log_under_test.append(generation_id, 2, delta)
    sealed = await log_under_test.seal(generation_id, sealed_attempt, SUCCEEDED)
    assert (sealed.terminal, sealed.end, sealed.is_open, sealed.deltas) == (SUCCEEDED, delta.end, False, ())
    for attempt in (1, 2, 3, 4):
        assert await log_under_test.status(generation_id, attempt, delta_after(delta.end, 4)) is AppendStatus.STALE
        assert not (await log_under_test.open(generation_id, attempt)).is_opened
    view = await log_under_test.read(generation_id)
    assert (view.deltas, view.terminal) == ((delta,), SUCCEEDED)


async def test_the_first_terminal_stays(log_under_test: LogUnderTest, generation_id: GenerationId) -> None:
    await log_under_test.open(generation_id, 1)
    first = await log_under_test.seal(generation_id, 1, FAILED)
    assert first.terminal == FAILED
    assert await log_under_test.seal(generation_id, 1, SUCCEEDED) == first
    assert await log_under_test.seal(generation_id, 1) == first


async def test_an_emptied_log_is_absent_until_it_is_opened_again_at_the_base(
    log_under_test: LogUnderTest, generation_id: GenerationId
) -> None:
    await log_under_test.open(generation_id, 1)
    stored = delta_after(Cursor(), 1, 2)
    await log_under_test.append(generation_id, 1, stored)
    await log_under_test.open(generation_id, 2, stored.end)
    resent = delta_after(stored.end, 3)
    await log_under_test.append(generation_id, 2, resent)
    await log_under_test.lose_all()
    assert await log_under_test.status(generation_id, 2, delta_after(resent.end, 4)) is AppendStatus.ABSENT
    reopened = await log_under_test.open(generation_id, 2, stored.end)
    assert reopened == OpenResult(is_opened=True, attempt=2, base=stored.end, end=stored.end, deltas=())
    assert await log_under_test.append(generation_id, 2, delta_after(resent.end, 4)) == AppendResult(
        status=AppendStatus.GAP, end=stored.end
    )
    assert await log_under_test.status(generation_id, 2, stored) is AppendStatus.DUP
    assert await log_under_test.status(generation_id, 2, resent) is AppendStatus.OK
    assert (await log_under_test.read(generation_id)).deltas == (resent,)


async def test_a_log_that_ends_before_the_stored_output_starts_anew_at_its_base(
    log_under_test: LogUnderTest, generation_id: GenerationId
) -> None:
    await log_under_test.open(generation_id, 1)
    await log_under_test.append(generation_id, 1, delta_after(Cursor(), 1))
    base = delta_after(Cursor(), 1, 2, 3).end
    opened = await log_under_test.open(generation_id, 2, base)
    assert opened == OpenResult(is_opened=True, attempt=2, base=base, end=base, deltas=())
    assert await log_under_test.status(generation_id, 2, delta_after(base, 4)) is AppendStatus.OK


async def test_a_log_that_contradicts_the_stored_output_starts_anew_at_its_base(
    log_under_test: LogUnderTest, generation_id: GenerationId
) -> None:
    await log_under_test.open(generation_id, 1)
    wrong = delta_after(Cursor(), 8, 9)
    await log_under_test.append(generation_id, 1, wrong)
    await log_under_test.append(generation_id, 1, delta_after(wrong.end, 10))
    base = delta_after(Cursor(), 1, 2).end
    opened = await log_under_test.open(generation_id, 2, base)
    assert opened == OpenResult(is_opened=True, attempt=2, base=base, end=base, deltas=())
    assert (await log_under_test.read(generation_id)).deltas == ()


async def test_items_of_one_call_are_judged_independently(log_under_test: LogUnderTest) -> None:
    good, absent, higher, lower, gapped = (new_generation_id() for _ in range(5))
    opens = [(good, 1), (higher, 2), (lower, 1), (gapped, 2)]
    await log_under_test.log.open_many([OpenItem(generation_id=each, attempt=attempt) for each, attempt in opens])
    delta = delta_after(Cursor(), 1)
    items = [
        (absent, 1, delta),
        (higher, 1, delta),
        (lower, 2, delta),
        (gapped, 2, delta_after(delta.end, 2)),
        (good, 1, delta),
    ]
    results = await log_under_test.log.append_many(
        [AppendItem(generation_id=each, attempt=attempt, delta=delta) for each, attempt, delta in items]
    )
    assert [result.status for result in results] == ["ABSENT", "STALE", "UNOPENED", "GAP", "OK"]
    opened = await log_under_test.log.open_many(
        [OpenItem(generation_id=each, attempt=2) for each in (good, higher, absent)]
    )
    assert [result.is_opened for result in opened] == [True, False, True]


async def test_items_of_one_generation_in_one_call_are_applied_in_order(
    log_under_test: LogUnderTest, generation_id: GenerationId
) -> None:
    await log_under_test.open(generation_id, 1)
    first, second = delta_after(Cursor(), 1, 2), delta_after(delta_after(Cursor(), 1, 2).end, 3)
    results = await log_under_test.log.append_many(
        [AppendItem(generation_id=generation_id, attempt=1, delta=delta) for delta in (second, first, second, first)]
    )
    assert [result.status for result in results] == ["GAP", "OK", "OK", "DUP"]


async def test_empty_lists_are_answered_with_empty_lists(log_under_test: LogUnderTest) -> None:
    log = log_under_test.log
    assert [await log.open_many([]), await log.append_many([]), await log.seal_many([]), await log.read_many([])] == [
        []
    ] * 4
    assert [await log.attach_many(GATEWAY, []), await log.last_watched_many([])] == [[], []]
