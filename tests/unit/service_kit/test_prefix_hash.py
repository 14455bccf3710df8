import pytest
from hypothesis import given
from hypothesis import strategies as st

from service_kit.prefix_hash import block_hashes, extend_block_hashes, prefix_root

ROOT = prefix_root(model_fingerprint="rev:fp32", tenant_salt="tenant")
ids = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(block_hashes(ROOT, range(n), 4)) for n in (0, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]


@given(ids, ids)
def test_hashes_agree_exactly_as_far_as_the_blocks_do(left: list[int], right: list[int]) -> None:
    left_hashes, right_hashes = block_hashes(ROOT, left, 4), block_hashes(ROOT, right, 4)
    for index, (one, other) in enumerate(zip(left_hashes, right_hashes, strict=False)):
        end = (index + 1) * 4
        assert (one == other) == (left[:end] == right[:end])


@given(ids, st.integers(0, 10))
def test_known_hashes_are_continued(token_ids: list[int], num_known: int) -> None:
    hashes = block_hashes(ROOT, token_ids, 4)
    assert block_hashes(ROOT, token_ids, 4, known=hashes[:num_known]) == hashes


@given(ids, st.integers(0, 10))
def test_a_list_of_hashes_grows_to_the_blocks_asked_for(token_ids: list[int], num_blocks: int) -> None:
    hashes = block_hashes(ROOT, token_ids, 4)
    num_blocks = min(num_blocks, len(hashes))
    grown = hashes[: num_blocks // 2]
    extend_block_hashes(ROOT, grown, token_ids, 4, num_blocks=num_blocks)
    assert grown == hashes[:num_blocks]
    extend_block_hashes(ROOT, grown, token_ids, 4, num_blocks=0)
    assert grown == hashes[:num_blocks]


@pytest.mark.parametrize(("model", "salt"), [("rev:int8", "tenant"), ("rev:fp32", "other"), ("rev:fp32t", "enant")])
def test_another_model_or_tenant_shares_no_hash(model: str, salt: str) -> None:
    other = prefix_root(model_fingerprint=model, tenant_salt=salt)
    assert block_hashes(other, range(4), 4) != block_hashes(ROOT, range(4), 4)


def test_equal_blocks_at_other_places_differ() -> None:
    first, second = block_hashes(ROOT, [1, 2, 1, 2], 2)
    assert first != second


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size"):
        block_hashes(ROOT, [1], 0)
