from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.cached_prefixes import CachedPrefixes
from gpu_worker.engine.port import CacheChanges

CHANGES = st.builds(
    CacheChanges,
    added=st.lists(st.integers(0, 9), unique=True).map(tuple),
    removed=st.lists(st.integers(0, 9), unique=True).map(tuple),
)


def added(*digests):
    return CacheChanges(added=digests)


def removed(*digests):
    return CacheChanges(removed=digests)


def test_a_new_feed_begins_with_everything():
    prefixes = CachedPrefixes()
    prefixes.apply(added(1, 2, 3))
    prefixes.apply(removed(2))
    assert prefixes.begin_feed().take() == added(1, 3)


def test_a_feed_says_each_change_once():
    prefixes = CachedPrefixes()
    feed = prefixes.begin_feed()
    prefixes.apply(added(1, 2))
    assert feed.take() == added(1, 2)
    assert feed.take() == CacheChanges()
    prefixes.apply(CacheChanges(added=(3,), removed=(1,)))
    assert feed.take() == CacheChanges(added=(3,), removed=(1,))


def test_what_came_and_went_between_two_messages_is_not_said():
    prefixes = CachedPrefixes()
    feed = prefixes.begin_feed()
    prefixes.apply(added(1))
    prefixes.apply(removed(1))
    assert feed.take() == CacheChanges()
    prefixes.apply(added(1))
    feed.take()
    prefixes.apply(removed(1))
    prefixes.apply(added(1))
    assert feed.take() == CacheChanges()


def test_an_older_feed_hears_no_more():
    prefixes = CachedPrefixes()
    old, new = prefixes.begin_feed(), prefixes.begin_feed()
    prefixes.apply(added(1))
    assert old.take() == CacheChanges()
    assert new.take() == added(1)


def test_beyond_the_bound_the_oldest_is_withdrawn():
    prefixes = CachedPrefixes(max_digests=2)
    feed = prefixes.begin_feed()
    prefixes.apply(added(1, 2))
    feed.take()
    prefixes.apply(added(3))
    assert feed.take() == CacheChanges(added=(3,), removed=(1,))
    prefixes.apply(removed(1))
    assert (feed.take(), len(prefixes)) == (CacheChanges(), 2)


@given(st.lists(st.tuples(CHANGES, st.sampled_from(["", "take", "new stream"]))), st.integers(1, 10))
def test_whoever_follows_a_feed_has_the_same_set(steps, max_digests):
    prefixes = CachedPrefixes(max_digests)
    feed, heard = prefixes.begin_feed(), set()

    def listen():
        changes = feed.take()
        assert heard.isdisjoint(changes.added)
        assert heard.issuperset(changes.removed)
        heard.difference_update(changes.removed)
        heard.update(changes.added)

    for changes, then in steps:
        prefixes.apply(changes)
        if then == "new stream":
            feed, heard = prefixes.begin_feed(), set()
        if then:
            listen()
            assert len(heard) == len(prefixes) <= max_digests
    listen()
    assert heard == set(prefixes.begin_feed().take().added)
