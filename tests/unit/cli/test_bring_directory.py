import json

import pytest

from service_kit.model_manifest import content_revision, find_model, read_manifest
from sluice.errors import UserError
from sluice.home import Home
from sluice.models.bring_directory import bring_directory, is_directory_name


@pytest.fixture
def home(tmp_path):
    return Home(root=tmp_path / "home")


@pytest.fixture
def source(tmp_path):
    directory = tmp_path / "published" / "tiny"
    directory.mkdir(parents=True)
    config = {"model_type": "gpt2", "n_positions": 64, "vocab_size": 258, "bos_token_id": 1, "eos_token_id": [2, 3]}
    write(directory, "config.json", config)
    write(directory, "generation_config.json", {"eos_token_id": 4})
    write(directory, "tokenizer_config.json", {"eos_token": {"content": "</s>"}})
    write(directory, "tokenizer.json", {"added_tokens": [{"id": 5, "content": "</s>"}, {"id": 6, "content": "<pad>"}]})
    (directory / "model.safetensors").write_bytes(b"weights")
    (directory / "consolidated.safetensors").write_bytes(b"the same again")
    (directory / "README.md").write_text("hello")
    return directory


def write(directory, name, fields):
    (directory / name).write_text(json.dumps(fields))


def test_a_directory_becomes_a_model_by_links_and_stays_as_it_is(home, source):
    before = sorted(source.iterdir())
    assert bring_directory(home, str(source)) == "tiny"
    made = find_model(home.models, "tiny")
    manifest = read_manifest(made)
    assert (manifest.model, manifest.context_length, manifest.vocab_size) == ("tiny", 64, 258)
    assert (manifest.bos_token_id, manifest.eos_token_ids) == (1, (2, 3, 4, 5))
    assert manifest.revision == content_revision(made)
    assert (made / "model.safetensors").readlink() == source / "model.safetensors"
    assert not (made / "consolidated.safetensors").exists()
    assert sorted(source.iterdir()) == before


def test_a_text_part_of_a_config_decides(home, source):
    inner = {"max_position_embeddings": 32, "vocab_size": 300, "eos_token_id": 7}
    write(source, "config.json", {"model_type": "gemma3", "text_config": inner})
    manifest = read_manifest(home.models / bring_directory(home, str(source)))
    assert (manifest.context_length, manifest.vocab_size, manifest.eos_token_ids) == (32, 300, (4, 5, 7))


def test_a_directory_is_hashed_again_only_when_it_changed(home, source):
    bring_directory(home, str(source))
    first = (home.models / "tiny").stat().st_ino
    bring_directory(home, f"{source}/")
    assert (home.models / "tiny").stat().st_ino == first
    (source / "model.safetensors").write_bytes(b"other weights")
    bring_directory(home, str(source))
    assert (home.models / "tiny").stat().st_ino != first
    assert read_manifest(home.models / "tiny").revision == content_revision(home.models / "tiny")


def test_a_model_that_was_not_linked_is_not_replaced(home, source):
    own = home.models / "tiny"
    own.mkdir(parents=True)
    read = json.dumps({"model": "tiny", "revision": "r", "precision": "fp32", "context_length": 1, "vocab_size": 1,
                       "bos_token_id": None, "eos_token_ids": []})  # fmt: skip
    (own / "sluice-model.json").write_text(read)
    with pytest.raises(UserError, match=r"a model tiny is in .* already"):
        bring_directory(home, str(source))
    assert bring_directory(home, str(own)) == "tiny"


@pytest.mark.parametrize(
    ("absent", "message"),
    [
        ("config.json", "no config.json"),
        ("tokenizer.json", "no tokenizer.json; AutoTokenizer"),
        ("model.safetensors", "no weights in safetensors files"),
    ],
)
def test_a_directory_that_lacks_something_is_refused_by_name(absent, message, home, source):
    (source / absent).unlink()
    (source / "consolidated.safetensors").unlink()
    with pytest.raises(UserError, match=message):
        bring_directory(home, str(source))
    assert find_model(home.models, "tiny") is None


@pytest.mark.parametrize("config", [{"vocab_size": 258}, {"n_positions": 64, "vocab_size": "many"}])
def test_a_config_without_sizes_is_refused_by_the_field(config, home, source):
    write(source, "config.json", config)
    with pytest.raises(UserError, match=r"config\.json has no (max_position_embeddings|vocab_size)"):
        bring_directory(home, str(source))


def test_only_what_has_a_slash_and_is_there_names_a_directory(source, monkeypatch):
    monkeypatch.chdir(source.parent)
    assert is_directory_name("./tiny")
    assert not is_directory_name("tiny")
    assert not is_directory_name("./absent")
