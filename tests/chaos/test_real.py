"""With a real model, an output is what the undisturbed run said, up to near-ties."""

import pytest

from tests.chaos.history import GenerationRow, Wish
from tests.chaos.oracle import Execution
from tests.chaos.real import NEAR_TIE, Reference, key_of, real_predictions

REFERENCE = Reference(
    token_ids=(5, 6, 7, 8), gaps=(2.0, NEAR_TIE / 2, 2.0, 2.0), text_by_length={2: "ab", 3: "abc", 4: "abcd"}
)
PREDICTIONS = real_predictions({key_of("prompt", 0.8, 7): REFERENCE})
EXECUTION = Execution(
    wish=Wish(request_id="r", text="prompt", max_output_tokens=4),
    row=GenerationRow(
        generation_id="g",
        request_id="r",
        state="SUCCEEDED",
        attempt=1,
        prompt_token_ids=(1,),
        seed=7,
        temperature=0.800000011920929,
        finish_reason="LENGTH",
        error_reason=None,
        output_tokens=4,
    ),
    attempts=(),
)


@pytest.mark.parametrize("token_ids", [(), (5,), (5, 6, 7, 8)])
def test_the_undisturbed_output_and_its_beginnings_are_good(token_ids: tuple[int, ...]) -> None:
    assert PREDICTIONS.tokens(EXECUTION, token_ids, False) is None


@pytest.mark.parametrize("token_ids", [(4,), (5, 6, 9, 8), (5, 6, 7, 8, 9)])
def test_another_token_is_found(token_ids: tuple[int, ...]) -> None:
    assert PREDICTIONS.tokens(EXECUTION, token_ids, False) is not None


def test_another_token_at_a_near_tie_and_what_follows_it_is_allowed() -> None:
    assert PREDICTIONS.tokens(EXECUTION, (5, 9, 9, 9), False) is None


def test_another_text_of_the_same_tokens_is_found() -> None:
    assert PREDICTIONS.text(EXECUTION, (5, 6, 7), "abx") is not None
    assert PREDICTIONS.text(EXECUTION, (5, 6, 7), "abc") is None


def test_a_character_that_the_end_cut_off_is_allowed() -> None:
    assert PREDICTIONS.text(EXECUTION, (5, 6), "ab\N{REPLACEMENT CHARACTER}") is None
