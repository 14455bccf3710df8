"""A GGUF file is a model wherever a model directory is: for the gateway, for the engine, on the command line."""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest

from gateway.model_registry import ModelRegistry
from gateway.tokenization import TextEncoder
from gpu_worker.artifacts.simulated_model import VOCAB_SIZE
from gpu_worker.engine.loading import load_native_engine, load_parts
from gpu_worker.engine.settings import EngineSettings
from service_kit.gguf.identity import content_hash
from service_kit.model_manifest import find_model, list_manifests, read_manifest
from sluice.errors import UserError
from sluice.home import Home, find_home
from sluice.local.services import Service, ServiceContext, ServiceInstance, service_spec
from sluice.models.bring import bring_gguf, is_file_name
from sluice.models.quantize import quantize
from tests.support.engine_runs import make_spec, run_to_end
from tests.support.gguf_files import write_gguf
from tests.support.tiny_models import make_tiny_model

SETTINGS = EngineSettings(threads=1, num_blocks=20, max_running=3)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A directory with `model`, and the same model as `tiny.gguf`."""
    root = tmp_path_factory.mktemp("made")
    make_tiny_model(root / "model", "llama", vocab_size=VOCAB_SIZE + 1, context_length=128)
    write_gguf(root / "tiny.gguf", root / "model")
    return root


@pytest.fixture
def home(tmp_path) -> Home:
    return find_home(tmp_path / "home")


async def test_gateway_and_engine_agree_about_a_file_and_the_engine_answers_as_from_the_directory(made, home):
    name = bring_gguf(home, str(made / "tiny.gguf"))
    registry = ModelRegistry(home.models)
    await registry.rescan()
    (served,) = registry.models()
    engine = load_native_engine(home.models / "tiny.gguf", settings=SETTINGS)
    capabilities = engine.capabilities()
    manifest = served.manifest
    assert (manifest.model, manifest.revision, manifest.precision) == (
        name, capabilities.model_revision, capabilities.precision,
    )  # fmt: skip
    assert (manifest.context_length, manifest.vocab_size) == (128, VOCAB_SIZE + 1)
    prompt = served.encoder.encode_text("some words")
    assert prompt[0] == manifest.bos_token_id
    output = run_to_end(engine, [make_spec("a", prompt)])["a"]
    reference = run_to_end(load_native_engine(made / "model", settings=SETTINGS), [make_spec("a", prompt)])["a"]
    assert output.token_ids == reference.token_ids
    assert len(output.token_ids) == 20
    await registry.rescan()
    assert registry.models() == [served], "what did not change is not read again"


async def test_a_file_that_changes_is_another_revision_and_a_broken_one_keeps_the_model(made, tmp_path):
    path = tmp_path / "tiny.gguf"
    shutil.copy(made / "tiny.gguf", path)
    registry = ModelRegistry(tmp_path)
    await registry.rescan()
    first = registry.models()[0].manifest.revision
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    await registry.rescan()
    assert registry.models()[0].manifest.revision not in ("", first)
    path.write_bytes(content[:1000])
    await registry.rescan()
    assert [model.manifest.model for model in registry.models()] == ["tiny"]


async def test_a_file_that_the_gateway_cannot_use_is_tried_once_until_it_is_another(made, tmp_path, monkeypatch):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, made / "model", pre="unheard-of")
    tried: list[Path] = []

    class CountingEncoder(TextEncoder):
        def __init__(self, model: Path) -> None:
            tried.append(model)
            super().__init__(model)

    monkeypatch.setattr("gateway.model_registry.TextEncoder", CountingEncoder)
    registry = ModelRegistry(tmp_path)
    for _ in range(3):
        await registry.rescan()
    assert (registry.models(), tried) == ([], [path])
    shutil.copy(made / "tiny.gguf", path)
    await registry.rescan()
    assert [model.manifest.model for model in registry.models()] == ["tiny"]


def test_the_revision_is_that_of_the_content_and_not_of_the_name_or_place(made, tmp_path):
    shutil.copy(made / "tiny.gguf", tmp_path / "other.gguf")
    first, second = read_manifest(made / "tiny.gguf"), read_manifest(tmp_path / "other.gguf")
    assert (first.revision, second.model) == (second.revision, "other")
    large = tmp_path / "large"
    large.write_bytes(bytes(40 << 20))
    before = content_hash((large,))
    with large.open("r+b") as file:
        file.seek(39 << 20)
        file.write(b"x")
    assert content_hash((large,)) != before


def test_a_named_file_is_linked_and_found_by_its_name(made, home, tmp_path):
    assert is_file_name("x/tiny.gguf")
    assert not is_file_name("tiny")
    assert bring_gguf(home, str(made / "tiny.gguf")) == "tiny"
    link = home.models / "tiny.gguf"
    assert link.readlink() == made / "tiny.gguf"
    assert list_manifests(home.models) == {"tiny": link}
    assert bring_gguf(home, str(link)) == "tiny", "it is there already"
    directory = home.models / "directory.gguf"
    shutil.copytree(made / "model", directory)
    dataclasses.replace(read_manifest(directory), model="directory.gguf").write(directory)
    assert list_manifests(home.models) == {"directory.gguf": directory, "tiny": link}
    assert find_model(home.models, "directory.gguf") == directory
    shutil.copy(made / "tiny.gguf", tmp_path / "tiny.gguf")
    bring_gguf(home, str(tmp_path / "tiny.gguf"))
    assert link.readlink() == tmp_path / "tiny.gguf", "the file that was named last"


def test_the_worker_of_a_local_stack_is_given_the_file(made, home, tmp_path):
    bring_gguf(home, str(made / "tiny.gguf"))
    worker = ServiceInstance(name="w", service=Service.GPU_WORKER, model="tiny", address="127.0.0.1:1")
    context = ServiceContext(
        postgres_dsn="dsn",
        redis_urls={},
        models_directory=home.models,
        engine="native",
        trace_directory=tmp_path,
        log_directory=tmp_path,
        internal_token="t",
    )
    given = service_spec(worker, [worker], context).environment["SLUICE_MODEL_DIR"]
    assert given == str(find_model(home.models, "tiny")) == str(home.models / "tiny.gguf")


def test_a_name_that_is_taken_and_a_file_that_cannot_be_read_are_refused(made, home, tmp_path):
    shutil.copytree(made / "model", home.models / "tiny")
    with pytest.raises(UserError, match=r"a model tiny is in .*rename tiny\.gguf"):
        bring_gguf(home, str(made / "tiny.gguf"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"cannot be served: .*broken\.gguf: version"):
        bring_gguf(home, str(tmp_path / "broken.gguf"))
    with pytest.raises(UserError, match=r"absent\.gguf"):
        bring_gguf(home, str(tmp_path / "absent.gguf"))
    write_gguf(tmp_path / "moe.gguf", made / "model", changes={"llama.expert_count": 8})
    with pytest.raises(UserError, match=r"cannot be served: .*llama\.expert_count: 8 is not understood"):
        bring_gguf(home, str(tmp_path / "moe.gguf"))
    assert list(home.models.iterdir()) == [home.models / "tiny"]


def test_an_int8_model_is_made_of_a_file(made, home):
    bring_gguf(home, str(made / "tiny.gguf"))
    manifest = quantize(home, "tiny", "tiny-int8", lambda _: None)
    assert manifest.precision == "int8"
    parts = load_parts(home.models / "tiny-int8", SETTINGS)
    assert parts.capabilities.vocab_size == VOCAB_SIZE + 1
