import pytest

from inference.internal.v1 import worker_pb2
from scheduler.codec import decode_load
from scheduler.policy import LOOK_AHEAD, Capacity, prefix_salt, room_of
from scheduler.session_load import EXPECTED_FOR_S, RECENT_HALF_LIFE_S, ExpectedPrefixes, PrefixSet, RecentWork


def capacity(**changes):
    values = {
        "session_id": "session",
        "max_running": 4,
        "num_outstanding": (0, 1, 0),
        "room_blocks": (10, 6, 2),
        "num_blocks": 20,
        "block_size": 16,
        "unseen_tokens": (0, 0, 0),
        "is_draining": False,
    }
    return Capacity(**values | changes)


def test_each_class_has_the_room_that_the_worker_reports_for_it():
    room = room_of(capacity())
    assert room.max_tokens == (160, 96, 32)
    assert room.max_entries == (4 + LOOK_AHEAD, 4 + LOOK_AHEAD - 1, 4 + LOOK_AHEAD - 1)
    assert room.capacity_tokens == 20 * 16


def test_a_worker_full_of_a_lower_class_has_all_its_slots_for_a_higher_one():
    room = room_of(capacity(num_outstanding=(0, 1, 8)))
    assert room.max_entries == (4 + LOOK_AHEAD, 4 + LOOK_AHEAD - 1, 0)


def test_what_was_dispatched_and_is_not_seen_yet_counts_against_its_own_and_lower_classes():
    assert room_of(capacity(unseen_tokens=(0, 20, 0))).max_tokens == (160, 76, 12)
    assert room_of(capacity(unseen_tokens=(10, 20, 50))).max_tokens == (150, 66, 0)


def test_a_draining_session_has_no_room():
    room = room_of(capacity(is_draining=True))
    assert (room.max_entries, room.max_tokens) == ((0, 0, 0), (0, 0, 0))


def test_a_report_is_decoded_with_its_room_per_class():
    message = worker_pb2.LoadReport(
        num_running=1, num_waiting=2, num_blocks=9, num_free_blocks=3, num_cached_blocks=4, room_blocks=[8, 5, 3]
    )
    load = decode_load(message)
    assert (load.num_running, load.num_waiting, load.num_blocks, load.num_cached_blocks) == (1, 2, 9, 4)
    assert load.room_blocks == (8, 5, 3)


def test_a_worker_that_reports_no_room_per_class_has_its_free_blocks_for_each():
    assert decode_load(worker_pb2.LoadReport(num_free_blocks=7)).room_blocks == (7, 7, 7)


def test_room_for_another_number_of_classes_is_an_error():
    with pytest.raises(ValueError, match="room_blocks"):
        decode_load(worker_pb2.LoadReport(room_blocks=[1, 2]))


def test_tenants_have_different_salts_unless_they_share():
    assert prefix_salt("a", is_shared=False) != prefix_salt("b", is_shared=False)
    assert prefix_salt("a", is_shared=True) == prefix_salt("b", is_shared=True) == ""


def test_the_leading_run_of_known_digests_counts():
    prefixes = PrefixSet()
    prefixes.reset([1, 2, 4])
    assert prefixes.num_cached_blocks([1, 2, 3, 4]) == 2
    assert prefixes.num_cached_blocks([3, 1]) == 0
    assert prefixes.num_cached_blocks([4]) == 1
    assert prefixes.num_cached_blocks([]) == 0


def test_changes_are_followed_and_a_new_stream_begins_anew():
    prefixes = PrefixSet()
    prefixes.reset([1, 2])
    prefixes.change(added=[3], removed=[2])
    assert prefixes.num_cached_blocks([1, 3]) == 2
    assert prefixes.num_cached_blocks([1, 2]) == 1
    prefixes.reset([9])
    assert (len(prefixes), prefixes.num_cached_blocks([1])) == (1, 0)


def test_no_more_digests_are_kept_than_the_bound():
    prefixes = PrefixSet(max_digests=2)
    prefixes.reset([1, 2, 3])
    assert len(prefixes) == 2
    prefixes.change(added=[3], removed=[1])
    assert prefixes.num_cached_blocks([2, 3]) == 2


def test_a_prefix_that_was_sent_is_expected_until_it_is_announced_or_some_seconds_have_passed():
    prefixes = PrefixSet()
    prefixes.expect([1, 2], now_s=0.0)
    assert prefixes.has(1, now_s=EXPECTED_FOR_S - 0.1)
    assert prefixes.num_cached_blocks([1]) == 0, "what is expected is not cached"
    prefixes.change(added=[1], removed=[])
    assert prefixes.has(1, now_s=EXPECTED_FOR_S)
    assert not prefixes.has(2, now_s=EXPECTED_FOR_S)
    prefixes.change(added=[], removed=[1])
    assert not prefixes.has(1, now_s=1.0), "it was announced, so it is not expected any more"


def test_sending_a_prefix_again_expects_it_anew():
    prefixes = PrefixSet()
    prefixes.expect([1, 2], now_s=0.0)
    prefixes.expect([1], now_s=5.0)
    assert prefixes.has(1, now_s=EXPECTED_FOR_S + 4.9)
    assert not prefixes.has(2, now_s=EXPECTED_FOR_S + 4.9)


def test_of_too_many_expected_prefixes_the_oldest_are_forgotten():
    expected = ExpectedPrefixes(max_digests=3)
    expected.add([1, 2, 3], now_s=0.0)
    expected.add([1, 4], now_s=1.0)
    assert [digest for digest in (1, 2, 3, 4) if expected.has(digest, now_s=1.0)] == [1, 3, 4]
    expected.add([5], now_s=EXPECTED_FOR_S)
    assert len(expected) == 3
    expected.add([6], now_s=EXPECTED_FOR_S + 1.0)
    assert len(expected) == 2, "those that did not come"


def test_recent_work_is_forgotten_by_and_by():
    work = RecentWork()
    work.add(100, now_s=0.0)
    assert work.at(RECENT_HALF_LIFE_S) == pytest.approx(50)
    work.add(50, now_s=RECENT_HALF_LIFE_S)
    assert work.at(2 * RECENT_HALF_LIFE_S) == pytest.approx(50)
