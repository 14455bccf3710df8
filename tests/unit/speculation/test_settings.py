"""What cannot be meant is refused by the name of the setting."""

import pytest

from gpu_worker.speculation.settings import SpeculationSettings


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mode": "often"}, "speculation 'often' is not one of"),
        ({"max_draft_tokens": 0}, "max_draft_tokens must be at least 1"),
        ({"mode": "draft"}, "speculation 'draft' needs a draft_model"),
        ({"mode": "ngram", "draft_model": "d"}, "draft_model is of no use with speculation 'ngram'"),
        ({"mode": "off", "draft_model": "d"}, "draft_model is of no use with speculation 'off'"),
        ({"draft_memory_share": 0.0}, "draft_memory_share must be above 0"),
        ({"draft_memory_share": 1.1}, "draft_memory_share must be above 0 and at most 1"),
        ({"draft_memory_share": float("nan")}, "draft_memory_share must be above 0"),
    ],
)
def test_a_setting_that_cannot_be_is_named(fields, words):
    with pytest.raises(ValueError, match=words):
        SpeculationSettings(**fields)
