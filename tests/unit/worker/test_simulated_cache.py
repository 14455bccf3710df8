"""The simulated engine's prefix cache and what it reports of its memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engine.simulated_plan import SimulatedBatch, SimulatedSequence
from service_kit.prefix_hash import block_hashes, digest_of, prefix_root
from tests.unit.worker.test_simulated_engine import run, spec

PROMPT = "a prompt of three full blocks and a bit more"


def cached_and_slept(engine, world, *specs):
    """Cached prompt tokens of the one sequence, and how long it took."""
    before = world.now
    ((_, finish),) = run(engine, *specs).values()
    return finish.cached_prompt_tokens, world.now - before


def test_a_cached_prefix_costs_no_time_and_another_salt_does_not_find_it(make_engine, world):
    engine = make_engine(prefill_tokens_per_s=1, block_size=16)
    first = spec("a", PROMPT, max_output_tokens=1)
    assert cached_and_slept(engine, world, first) == (0, len(PROMPT))
    assert cached_and_slept(engine, world, spec("b", PROMPT, max_output_tokens=1)) == (32, len(PROMPT) - 32)
    stranger = spec("c", PROMPT, max_output_tokens=1, prefix_salt="stranger")
    assert cached_and_slept(engine, world, stranger) == (0, len(PROMPT))
    load = engine.load_report()
    assert (load.num_cached_prompt_tokens, load.num_computed_prompt_tokens) == (32, 3 * len(PROMPT) - 32)
    assert load.num_cached_blocks == 4


def test_of_a_prompt_that_is_cached_as_a_whole_the_last_token_is_computed(make_engine, world):
    engine = make_engine(prefill_tokens_per_s=1, block_size=4)
    run(engine, spec("a", "12345678", max_output_tokens=1))
    assert cached_and_slept(engine, world, spec("b", "12345678", max_output_tokens=1)) == (7, 1)


def test_without_the_cache_everything_is_computed(make_engine, world):
    engine = make_engine(prefill_tokens_per_s=1, has_prefix_cache=False)
    run(engine, spec("a", PROMPT, max_output_tokens=1))
    assert cached_and_slept(engine, world, spec("b", PROMPT, max_output_tokens=1)) == (0, len(PROMPT))
    assert engine.load_report().num_cached_blocks == 0


@pytest.mark.parametrize("has_prefix_cache", [True, False])
def test_the_cache_changes_no_output(has_prefix_cache, make_engine):
    engine = make_engine(has_prefix_cache=has_prefix_cache)
    outputs = {run(engine, spec(name, PROMPT))[name][0].token_ids for name in "abc"}
    assert outputs == {run(make_engine(), spec("d", PROMPT))["d"][0].token_ids}


def test_changes_name_the_blocks_by_digest_as_a_scheduler_computes_it(make_engine):
    engine = make_engine(block_size=16)
    engine.add(spec("a", PROMPT, prefix_salt="t", max_output_tokens=2))
    capabilities = engine.capabilities()
    fingerprint = f"{capabilities.model_revision}:{capabilities.precision}"
    root = prefix_root(model_fingerprint=fingerprint, tenant_salt="t")
    expected = tuple(map(digest_of, block_hashes(root, PROMPT.encode(), 16)))
    assert engine.step().cache_changes.added == expected
    assert engine.step().cache_changes.added == ()


def test_the_longest_unused_prefix_makes_room_and_its_end_goes_first(make_engine):
    engine = make_engine(block_size=4, num_blocks=6)
    added = {}
    for name, prompt in (("a", "aaaaaaaa"), ("b", "bbbbbbbb")):
        engine.add(spec(name, prompt, max_output_tokens=1))
        added[name] = engine.step().cache_changes.added
    engine.add(spec("c", "cccccccccc", max_output_tokens=1))  # 3 blocks, 3 are left for what is unused: one has to go
    assert engine.step().cache_changes.removed == (added["a"][1],)


def test_room_per_class_counts_lower_classes_and_what_waits_before(make_engine):
    engine = make_engine(block_size=4, num_blocks=10, max_running=2)
    assert engine.load_report().room_blocks == (10, 10, 10)
    engine.add(spec("batch", "x" * 8, max_output_tokens=20, priority=2))
    engine.add(spec("standard", "y" * 4, max_output_tokens=20, priority=1))
    engine.step()
    # 2 and 1 blocks hold the prompts; the next tokens have found none yet.
    assert engine.load_report().room_blocks == (10, 9, 7)
    engine.add(spec("waiting", "z" * 12, max_output_tokens=4, priority=1))
    assert engine.load_report().room_blocks == (10, 6, 4)


@given(data=st.data())
def test_whoever_follows_the_changes_has_the_cache_and_it_fits_into_the_memory(data):
    num_blocks, block_size = data.draw(st.integers(5, 12)), data.draw(st.integers(1, 3))
    batch = SimulatedBatch(num_blocks=num_blocks, block_size=block_size, max_running=3)
    root = prefix_root(model_fingerprint="m", tenant_salt="")
    digests, live, num_filled = set(), [], 0
    for number in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(["add", "step", "step", "remove"]))
        if what == "add":
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=num_blocks * block_size // 2))
            live.append(
                SimulatedSequence(
                    sequence_id=str(number),
                    rank=(data.draw(st.integers(0, 2)), number),
                    num_tokens=len(tokens),
                    hashes=block_hashes(root, tokens, block_size),
                )
            )
            batch.add(live[-1])
        elif what == "remove" and live:
            batch.remove(live.pop(data.draw(st.integers(0, len(live) - 1))))
        elif what == "step":
            for sequence, chunk in batch.plan(8):
                batch.advance(sequence, chunk)
                if sequence.num_tokens >= num_blocks * block_size:
                    live.remove(sequence)
                    batch.remove(sequence)
        changes = batch.cache.take_changes()
        assert digests.isdisjoint(changes.added)
        assert digests.issuperset(changes.removed)
        digests = digests - set(changes.removed) | set(changes.added)
        assert len(digests) == len(batch.cache) <= num_blocks
        assert batch.cache.num_unused <= batch.num_free_blocks
        assert batch.num_computed_prompt_tokens >= num_filled
        num_filled = batch.num_computed_prompt_tokens
        room = batch.room_blocks()
        assert num_blocks >= room[0] >= room[1] >= room[2] >= 0
    for sequence in live:
        batch.remove(sequence)
    assert batch.room_blocks() == (num_blocks,) * 3
    assert batch.cache.num_unused == len(batch.cache)
