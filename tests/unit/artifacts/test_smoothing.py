"""Smoothing changes what rounding costs, and nothing else."""

import pytest
import torch

from gpu_worker.artifacts.quantize import calibrate
from gpu_worker.artifacts.smoothing import round_weight, smooth_layer
from gpu_worker.artifacts.weights import Checkpoint
from gpu_worker.layers.linear.factory import LinearFactory
from gpu_worker.models.config import read_model_config
from gpu_worker.models.llama import LlamaModel
from gpu_worker.models.llama_tensors import ignored_suffixes, layer_prefix, layer_shapes, tensor_shapes
from tests.support.tiny_models import make_tiny_model

FAMILIES = {
    "llama": {},
    "qwen2": {"num_key_value_heads": 1},
    "qwen3": {"head_dim": 24},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
}


def see_yourself(_layer, _query, _key, value):
    """Attention of rows that see nothing but themselves."""
    return value.repeat_interleave(_query.shape[1] // value.shape[1], dim=1)


def hidden_states(config, tensors):
    model = LlamaModel(config, lambda names: {name: tensors[name] for name in names}, LinearFactory())
    token_ids = torch.arange(40) * 5
    return model.forward(token_ids, torch.arange(40), see_yourself)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_smoothed_model_computes_the_same(tmp_path, family):
    make_tiny_model(tmp_path, family.split()[0], **FAMILIES[family])
    config = read_model_config(tmp_path)
    _, maxima = calibrate(tmp_path, config, context_length=256)
    checkpoint = Checkpoint(tmp_path, shapes=tensor_shapes(config), ignored_suffixes=ignored_suffixes(config))
    tensors = checkpoint.read(tensor_shapes(config), device=torch.device("cpu"), dtype=torch.float32)
    smoothed = dict(tensors)
    for index in range(config.num_layers):
        prefix = layer_prefix(index)
        layer = {name.removeprefix(prefix): tensors[name] for name in layer_shapes(config, index)}
        changed = smooth_layer(layer, maxima[index], config)
        assert all(
            not torch.equal(changed[name], tensor) for name, tensor in layer.items() if name.endswith("v_proj.weight")
        )
        smoothed |= {prefix + name: tensor for name, tensor in changed.items()}
    expected, result = hidden_states(config, tensors), hidden_states(config, smoothed)
    assert (result - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_rounded_weights_are_within_half_a_step_of_each_row():
    weight = torch.randn(7, 33, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    rounded, scale = round_weight(weight)
    assert rounded.dtype == torch.int8
    assert rounded[[0, 1, 2, 4, 5, 6]].abs().amax(dim=1).tolist() == [127] * 6
    assert ((rounded * scale[:, None] - weight).abs() <= 0.501 * scale[:, None]).all()
    assert not rounded[3].any()
