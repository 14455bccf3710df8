import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gpu_worker.artifacts.weights import Checkpoint, WeightsError

SHAPES = {"a.weight": (2, 3), "b.weight": (4,)}


def make_tensors(**changes):
    return {"a.weight": torch.ones(2, 3), "b.weight": torch.arange(4.0), **changes}


def load(directory, dtype=torch.float32):
    checkpoint = Checkpoint(directory, shapes=SHAPES, ignored_suffixes=(".inv_freq",))
    return checkpoint.read(SHAPES, device=torch.device("cpu"), dtype=dtype)


def num_mappings(path):
    return sum(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())


def write_shards(directory, weight_map):
    for file in set(weight_map.values()):
        names = [name for name, where in weight_map.items() if where == file]
        save_file({name: make_tensors()[name] for name in names}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_one_file_is_read_and_ignored_buffers_are_left_out(tmp_path):
    save_file(make_tensors(**{"x.inv_freq": torch.ones(1)}), tmp_path / "model.safetensors")
    weights = load(tmp_path)
    assert weights.keys() == SHAPES.keys()
    assert torch.equal(weights["b.weight"], torch.arange(4.0))


def test_weights_of_another_width_are_converted(tmp_path):
    save_file(make_tensors(**{"b.weight": torch.arange(4.0).bfloat16()}), tmp_path / "model.safetensors")
    assert load(tmp_path)["b.weight"].dtype == torch.float32


def test_shards_are_found_through_the_index(tmp_path):
    write_shards(tmp_path, {"a.weight": "one.safetensors", "b.weight": "two.safetensors"})
    assert torch.equal(load(tmp_path)["b.weight"], torch.arange(4.0))


def test_only_the_tensors_that_were_asked_for_are_read_from_all_their_files(tmp_path):
    write_shards(tmp_path, {"a.weight": "one.safetensors", "b.weight": "two.safetensors"})
    checkpoint = Checkpoint(tmp_path, shapes=SHAPES, ignored_suffixes=())
    assert checkpoint.read(["b.weight"], device=torch.device("cpu"), dtype=torch.float32).keys() == {"b.weight"}


def test_a_file_is_mapped_only_while_tensors_of_it_are_alive(tmp_path):
    save_file(make_tensors(), tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, shapes=SHAPES, ignored_suffixes=())
    assert num_mappings(tmp_path) == 0
    weights = checkpoint.read(SHAPES, device=torch.device("cpu"), dtype=torch.float32)
    del weights["b.weight"]
    assert num_mappings(tmp_path) > 0, "the tensor would be a copy"
    weights.clear()
    assert num_mappings(tmp_path) == 0


def test_a_missing_tensor_is_named(tmp_path):
    save_file({"a.weight": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"missing tensors: b\.weight"):
        load(tmp_path)


def test_an_unexpected_tensor_is_named(tmp_path):
    save_file(make_tensors(**{"c.weight": torch.ones(1)}), tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"unexpected tensors: c\.weight"):
        load(tmp_path)


def test_a_tensor_of_another_shape_is_named(tmp_path):
    save_file(make_tensors(**{"a.weight": torch.ones(3, 2)}), tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"a\.weight has shape \(3, 2\), the config asks for \(2, 3\)"):
        load(tmp_path)


def test_a_quantized_tensor_is_named(tmp_path):
    save_file(make_tensors(**{"a.weight": torch.ones(2, 3, dtype=torch.int8)}), tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"a\.weight is I8"):
        load(tmp_path)


def test_an_absent_or_torn_file_is_named(tmp_path):
    with pytest.raises(WeightsError, match=r"model\.safetensors: not readable"):
        load(tmp_path)
    save_file(make_tensors(), tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-8])
    with pytest.raises(WeightsError, match=r"model\.safetensors: not readable"):
        load(tmp_path)


def test_an_index_cannot_point_outside_the_directory(tmp_path):
    index = {"weight_map": {"a.weight": "../elsewhere.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match="not the name of a file beside it"):
        load(tmp_path)


def test_an_index_that_names_a_tensor_its_file_lacks_is_refused(tmp_path):
    write_shards(tmp_path, {"a.weight": "one.safetensors", "b.weight": "two.safetensors"})
    save_file({"other": torch.ones(1)}, tmp_path / "two.safetensors")
    with pytest.raises(WeightsError, match=r"two\.safetensors: lacks b\.weight"):
        load(tmp_path)
