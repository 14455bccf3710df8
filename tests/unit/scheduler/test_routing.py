import pytest

from scheduler.routing import BATCH_COST_TOKENS, Candidate, Routable, prompt_digests, route
from scheduler.session_load import EXPECTED_FOR_S, PrefixSet
from service_kit.prefix_hash import block_hashes, digest_of, prefix_root
from state_store.model import PriorityClass

BLOCK = 16
PLENTY = (100, 100, 100)


def session(name, *, cached=(), block_size=BLOCK, **changes):
    prefixes = PrefixSet()
    prefixes.reset(cached)
    values = {
        "session_id": name,
        "block_size": block_size,
        "max_running": 16,
        "max_entries": PLENTY,
        "max_tokens": (10_000, 10_000, 10_000),
        "max_charged": 1,
        "num_attempts": (0, 0, 0),
        "tokens_to_fill": (0, 0, 0),
        "recent_tokens": 0.0,
        "prefixes": prefixes,
    }
    return Candidate(**values | changes)


def item(counted, *digests, tokens=100, priority_class=PriorityClass.STANDARD, is_charged=False, kept=()):
    return Routable(
        session_id=counted,
        kept=frozenset(kept),
        priority_class=priority_class,
        max_tokens=tokens,
        is_charged=is_charged,
        digests={BLOCK: digests},
    )


def names(items, candidates, *, now_s=0.0):
    return [each.session_id for each in route(items, candidates, now_s=now_s)]


def test_an_entry_goes_where_most_of_it_is_cached():
    candidates = [session("a", cached=[1]), session("b", cached=[1, 2, 3])]
    (found,) = route([item("a", 1, 2, 3, 4)], candidates, now_s=0.0)
    assert (found.session_id, found.cached_tokens, found.digests) == ("b", 3 * BLOCK, (1, 2, 3, 4))


def test_only_a_leading_run_of_blocks_counts_as_cached():
    candidates = [session("a", cached=[2, 3, 4]), session("b", cached=[1])]
    assert names([item("a", 1, 2, 3, 4)], candidates) == ["b"]


def test_the_last_token_is_computed_even_where_all_blocks_are_cached():
    (found,) = route([item("a", 1, 2, tokens=33)], [session("a", cached=[1, 2])], now_s=0.0)
    assert found.cached_tokens == 32
    (found,) = route([item("a", 1, 2, tokens=32)], [session("a", cached=[1, 2])], now_s=0.0)
    assert found.cached_tokens == 31


@pytest.mark.parametrize(
    "load",
    [
        {"tokens_to_fill": (0, 49, 0)},
        {"num_attempts": (0, 1, 0), "max_running": BATCH_COST_TOKENS // 49},
        {"recent_tokens": 2000.0},
    ],
    ids=["much to compute", "a slot in use", "more than its share lately"],
)
def test_load_outweighs_a_shorter_cached_prefix(load):
    candidates = [session("a", cached=[1, 2, 3], **load), session("b")]
    assert names([item("a", 1, 2, 3, 4)], candidates) == ["b"]
    longer = [session("a", cached=range(1, 200), **load), session("b")]
    assert names([item("a", *range(1, 200), tokens=199 * BLOCK + 1)], longer) == ["a"]


def test_what_was_sent_and_is_not_announced_yet_draws_until_it_should_have_come():
    sent = session("a", tokens_to_fill=(0, 30, 0))
    sent.prefixes.expect([1, 2, 3], now_s=0.0)
    assert names([item("b", 1, 2, 3)], [sent, session("b")]) == ["a"]
    assert names([item("b", 1, 2, 3)], [sent, session("b")], now_s=EXPECTED_FOR_S) == ["b"]


def test_entries_of_one_round_with_one_prefix_go_together_and_strangers_elsewhere():
    shared = tuple(range(1, 40))
    tokens = 39 * BLOCK + 1
    items = [item("a", *shared, tokens=tokens), item("b", 90, 91, tokens=tokens), item("b", *shared, 40, tokens=tokens)]
    first, stranger, third = route(items, [session("a"), session("b")], now_s=0.0)
    assert (first.session_id, stranger.session_id, third.session_id) == ("a", "b", "a")
    assert third.cached_tokens == tokens - 1


def test_entries_without_a_prefix_spread():
    found = names([item("a", tokens=100) for _ in range(6)], [session("a"), session("b")])
    assert sorted(found) == ["a", "a", "a", "b", "b", "b"]


def test_a_batch_of_a_lower_class_is_in_the_way_less_than_one_of_the_same():
    lower, equal = session("a", num_attempts=(0, 0, 10)), session("b", num_attempts=(0, 10, 0))
    assert names([item("b")], [equal, lower]) == ["a"]
    assert names([item("a")], [lower, session("c")]) == ["c"]


def test_nothing_goes_where_it_does_not_fit_beside_what_the_queue_counted_there():
    full = session("b", cached=[1, 2, 3], max_tokens=(150, 150, 150))
    assert names([item("a", 1, 2, 3), item("b", 8, 9)], [session("a"), full]) == ["a", "b"]
    one_slot = session("b", cached=[1, 2, 3], max_entries=(9, 1, 1))
    assert names([item("a", 1, 2, 3), item("b", 8, 9)], [session("a"), one_slot]) == ["a", "b"]


def test_room_that_an_entry_of_the_round_leaves_is_there_for_the_next():
    a, b = session("a", cached=range(1, 6), max_tokens=(200, 200, 200)), session("b", cached=[7, 8, 9])
    items = [item("a", 7, 8, 9), item("a", 40, 41), item("b", *range(1, 6))]
    assert names(items, [a, b])[::2] == ["b", "a"]


def test_a_session_that_is_kept_for_another_entry_takes_nothing_else():
    candidates = [session("a", cached=[1, 2, 3]), session("b")]
    assert names([item("b", 1, 2, 3, kept=["a"])], candidates) == ["b"]


def test_an_entry_stays_with_the_session_that_the_queue_kept_for_it():
    assert names([item("a", kept=["a"])], [session("a")]) == ["a"]


def test_no_second_charged_entry_joins_one_that_is_aboard():
    suspect = session("a", cached=[1, 2, 3], max_charged=0)
    assert names([item("b", 1, 2, 3, is_charged=True)], [suspect, session("b")]) == ["b"]
    assert names([item("b", 1, 2, 3)], [suspect, session("b")]) == ["a"]
    both = [session("a", cached=[1, 2, 3]), session("b")]
    items = [item("a", 1, 2, 3, is_charged=True), item("b", 1, 2, 3, is_charged=True)]
    assert names(items, both) == ["a", "b"]


def test_each_session_is_asked_for_the_blocks_of_its_own_size():
    digests = prompt_digests(range(64), fingerprint="r1:fp32", tenant_salt="t", block_sizes={16, 32})
    root = prefix_root(model_fingerprint="r1:fp32", tenant_salt="t")
    assert digests[32] == tuple(map(digest_of, block_hashes(root, range(64), 32)))
    candidates = [session("a", cached=digests[16][:3]), session("b", block_size=32, cached=digests[32])]
    entry = Routable(
        session_id="a", priority_class=PriorityClass.BATCH, max_tokens=65, is_charged=False, digests=digests
    )
    (found,) = route([entry], candidates, now_s=0.0)
    assert (found.session_id, found.cached_tokens) == ("b", 64)


def test_equal_costs_go_to_the_session_with_less_recent_work():
    assert names([item("a")], [session("a", recent_tokens=10.0), session("b")]) == ["b"]
