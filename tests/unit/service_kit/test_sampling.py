import json
from typing import Any

import pytest

from service_kit.sampling import MAX_SEED, InvalidSamplingError, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_output_tokens", 0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 100.5),
        ("top_k", -1),
        ("top_k", (1 << 20) + 1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
        ("stop", ("",)),
        ("stop", ("a\x00b",)),
        ("stop", ("a" * 257,)),
        ("stop", ("a",) * 17),
        ("stop_token_ids", tuple(range(65))),
        ("stop_token_ids", (-1,)),
    ],
)
def test_a_value_outside_its_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidSamplingError) as caught:
        SamplingParams(**{"max_output_tokens": 1, field: value})
    assert caught.value.field == field


def test_the_bounds_themselves_are_allowed() -> None:
    SamplingParams(
        max_output_tokens=1,
        temperature=100.0,
        top_k=1 << 20,
        top_p=1e-6,
        seed=MAX_SEED,
        stop=("a" * 256,) * 16,
        stop_token_ids=tuple(range(64)),
    )


def test_parameters_survive_json() -> None:
    params = SamplingParams(max_output_tokens=7, temperature=0.5, stop=("x", "y"), stop_token_ids=(3,), ignore_eos=True)
    assert SamplingParams.from_dict(json.loads(json.dumps(params.to_dict()))) == params
