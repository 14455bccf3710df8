"""The draft model's KV memory is rolled back to what is right of it."""

import random

from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.speculation.draft_contexts import DraftContexts


def test_right_proposals_stay_and_wrong_ones_go_with_all_behind_them():
    contexts = DraftContexts(BlockPool(num_blocks=8, block_size=2))
    context = contexts.use("s", [1, 2, 3])
    assert contexts.reserve(context, 6, spared=())
    context.compute([1, 2, 3], 3)
    context.compute([4], 3)
    context.compute([5], 3)
    assert context.num_computed == 5
    # 4 was right, 5 was not: the newest token, 9, is to be computed.
    assert contexts.use("s", [1, 2, 3, 4, 9]).num_computed == 4
    assert len(context.block_table) == 2
    contexts.check_integrity()


def test_the_newest_token_is_always_computed_again():
    contexts = DraftContexts(BlockPool(num_blocks=8, block_size=2))
    context = contexts.use("s", [1, 2])
    contexts.reserve(context, 4, spared=())
    context.compute([1, 2], 2)
    context.compute([3], 2)
    assert contexts.use("s", [1, 2, 3]).num_computed == 2
    assert contexts.use("s", [1, 2, 3]).num_computed == 2
    assert contexts.num_missing("s", [1, 2, 3]) == 1
    assert contexts.num_missing("unknown", [1, 2, 3]) == 3


def test_who_was_used_longest_ago_loses_its_blocks_unless_it_is_spared():
    contexts = DraftContexts(BlockPool(num_blocks=3, block_size=2))
    for name in ("old", "new"):
        assert contexts.reserve(contexts.use(name, [1, 2]), 2, spared=())
    context = contexts.use("more", [1, 2, 3, 4, 5, 6])
    assert not contexts.reserve(context, 6, spared={"new", "more"})
    contexts.check_integrity()
    assert contexts.reserve(context, 4, spared={"new", "more"})
    assert len(contexts) == 2
    contexts.check_integrity()


def test_any_history_leaves_what_is_right():
    drawn = random.Random(1)
    contexts = DraftContexts(BlockPool(num_blocks=40, block_size=4))
    token_ids, stored = [0], []
    for _ in range(300):
        if len(token_ids) > 120:
            token_ids, stored = [0], []
            contexts.forget("s")
        context = contexts.use("s", token_ids)
        assert context.num_computed < len(token_ids)
        assert stored[: context.num_computed] == token_ids[: context.num_computed]
        del stored[context.num_computed :]
        assert contexts.reserve(context, len(token_ids) + 4, spared=())
        proposed = [drawn.randrange(2) for _ in range(drawn.randrange(5))]
        missing = token_ids[context.num_computed :]
        context.compute(missing, len(token_ids))
        for token_id in proposed[:-1]:
            context.compute([token_id], len(token_ids))
        stored += [*missing, *proposed[:-1]]
        contexts.check_integrity()
        token_ids = token_ids + [drawn.randrange(2) for _ in range(drawn.randint(1, 4))]
