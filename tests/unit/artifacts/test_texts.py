import dataclasses

import pytest

from gpu_worker.artifacts.texts import CALIBRATION, EVALUATION
from service_kit.model_manifest import ModelFilesError


def test_the_texts_are_those_that_their_hashes_name():
    assert len(EVALUATION.read().split()) > 15_000
    assert CALIBRATION.read().startswith("The harbour")


def test_they_have_no_sentence_in_common():
    sentences = {sentence.strip() for sentence in CALIBRATION.read().split(".") if len(sentence.split()) > 3}
    assert len(sentences) > 20
    evaluation = EVALUATION.read()
    assert not any(sentence in evaluation for sentence in sentences)


@pytest.mark.parametrize(
    ("field", "value", "reason"), [("sha256", "0" * 64, "another text"), ("file", "no.txt", "not readable")]
)
def test_another_text_is_refused(field, value, reason):
    with pytest.raises(ModelFilesError, match=reason):
        dataclasses.replace(CALIBRATION, **{field: value}).read()
